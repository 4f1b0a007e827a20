-- Tasks that were forgotten, in a run that groups are pushed to without leases: such a push has no lease by which a
-- late repeat of it is known. Sorted set `remembered` (score: the run's revision when the task was forgotten, above
-- that at which its group was accepted) holds the last REMEMBERED_TASKS of them.
--
-- ctx.remembered: whether each of the tasks is there that this call pushes a group of, without a lease.
--
-- state.forgotten: the highest score that was dropped, and at first the revision with which the run began. Who pushes a
-- group says which revision it knew before its first try. From there on nothing was accepted that is forgotten now
-- unless that revision is below this one.

-- @include run

local Remembered = {}

-- The tasks are about to be forgotten.
function Remembered.add(ctx, task_ids, ahead)
  local state = ctx.state
  if not state.leaseless then
    return
  end
  local revision, entries = format('%d', state.revision + ahead), {}
  for index, task_id in ipairs(task_ids) do
    entries[2 * index - 1], entries[2 * index] = revision, task_id
  end
  call_many('ZADD', key('remembered'), entries)
  local beyond = call('ZCARD', key('remembered')) - REMEMBERED_TASKS
  if beyond > 0 then
    local dropped = call('ZPOPMIN', key('remembered'), beyond)
    state.forgotten = math.max(state.forgotten or 0, tonumber(dropped[#dropped]))
    Run.write(ctx)
  end
end

-- Forgets tasks. `ahead`: 1 where the run's revision is still to rise, 0 after that. A resume that has them generated
-- again forgets their names too.
function Remembered.forget(ctx, task_ids, ahead)
  local resuming = ctx.state.resuming
  if not (resuming and resuming[4] == 1) then
    Remembered.add(ctx, task_ids, ahead)
  end
  call_many('HDEL', key('tasks'), task_ids)
  call_many('HDEL', key('specs'), task_ids)
end

-- Nothing that was accepted so far counts any more: the same tasks are to be generated again.
function Remembered.forget_all(ctx)
  local state = ctx.state
  call('UNLINK', key('remembered'))
  state.forgotten = state.revision
end

-- Looks up whether tasks are remembered, before groups of them are pushed without leases.
function Remembered.look_up(ctx, task_ids)
  ctx.remembered = {}
  local scores = #task_ids > 0 and call('ZMSCORE', key('remembered'), unpack(task_ids))
  for index, task_id in ipairs(task_ids) do
    ctx.remembered[task_id] = scores[index]
  end
end

-- What becomes of a push without a lease whose task is not known, or not known any more; nil when it may make its task.
function Remembered.recall(ctx, task_id, first_revision)
  local forgotten = ctx.state.forgotten or 0
  if ctx.remembered[task_id] then
    return 'closed'
  elseif first_revision > 0 and first_revision < forgotten then
    local limit = format('at least %d: what was accepted before may have been forgotten', forgotten)
    return {'first_revision', format('%d', first_revision), limit}
  end
  return nil
end
