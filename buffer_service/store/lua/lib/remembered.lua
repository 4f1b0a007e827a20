-- Tasks that were forgotten, in a run that groups are pushed to without leases: such a push has no lease by which a
-- late repeat of it is known. Sorted set `remembered` (score: the run's revision when the task was forgotten, above
-- that at which its group was accepted) holds the last REMEMBERED_TASKS of them.
--
-- state.forgotten: the highest score that was dropped, and at first the revision with which the run began. Who pushes a
-- group says which revision it knew before its first try. From there on nothing was accepted that is forgotten now
-- unless that revision is below this one.

-- @include run
-- @include bounds

local REMEMBERED = key('remembered')

-- The tasks are about to be forgotten.
local function remember(task_ids)
  if not state.leaseless then
    return
  end
  local revision = format('%d', state.revision)
  for _, task_id in ipairs(task_ids) do
    call('ZADD', REMEMBERED, revision, task_id)
  end
  local beyond = call('ZCARD', REMEMBERED) - REMEMBERED_TASKS
  if beyond > 0 then
    local dropped = call('ZPOPMIN', REMEMBERED, beyond)
    state.forgotten = math.max(state.forgotten or 0, tonumber(dropped[#dropped]))
    write_run()
  end
end

-- Nothing that was accepted so far counts any more: the same tasks are to be generated again.
local function forget_remembered()
  call('UNLINK', REMEMBERED)
  state.forgotten = state.revision
end

-- What becomes of a push without a lease whose task is not known, or not known any more; nil when it may make its task.
local function recall(task_id, first_revision)
  local forgotten = state.forgotten or 0
  if call('ZSCORE', REMEMBERED, task_id) then
    return 'closed'
  elseif first_revision > 0 and first_revision < forgotten then
    local limit = format('at least %d: what was accepted before may have been forgotten', forgotten)
    return {'first_revision', format('%d', first_revision), limit}
  end
  return nil
end
