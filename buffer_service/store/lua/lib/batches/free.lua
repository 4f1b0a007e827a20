-- Freeing what replays no longer need, in portions.

-- @include batches
-- @include remembered

local Free = {}

-- What one script takes on: few enough that it holds the store up for milliseconds only.
Free.VICTIMS = 256

-- Frees groups of a step; payload and task of what is used again stay.
function Free.free_groups(ctx, groups)
  local payloads, task_ids = {}, {}
  for _, group in ipairs(groups) do
    if not Reuse.release(ctx, group) then
      for _, payload in ipairs(Record.payloads(group)) do
        payloads[#payloads + 1] = payload
      end
      task_ids[#task_ids + 1] = group[G_TASK]
    end
  end
  call_many('SADD', key('trash'), payloads)
  Remembered.forget(ctx, task_ids, 0)
end

-- Frees up to about VICTIMS groups and tombstones that may be freed; returns whether more are left. Writes the run.
function Free.portion(ctx)
  local state = ctx.state
  local freed = 0
  local before = state.freed_steps
  while freed < Free.VICTIMS and state.freed_steps < state.checkpointed_steps do
    local header = Batches.load_step(state.freed_steps)
    if header then
      freed = freed + Batches.dismantle(state.freed_steps, header, Free.VICTIMS - freed, function(groups)
        Free.free_groups(ctx, groups)
      end)
    end
    if header and not Batches.is_empty(header) then
      Batches.save_step(state.freed_steps, header)
    else
      Batches.delete_step(state.freed_steps)
      state.freed_steps = state.freed_steps + 1
      freed = freed + 1
    end
  end
  local ended, through = key('ended'), format('%d', state.ended_through)
  local tombs = call('ZRANGEBYSCORE', ended, '-inf', through, 'LIMIT', 0, math.max(0, Free.VICTIMS - freed))
  if #tombs > 0 then
    Remembered.forget(ctx, tombs, 0)
    call_many('ZREM', ended, tombs)
  end
  if state.freed_steps ~= before then
    Run.write(ctx)
  end
  return state.freed_steps < state.checkpointed_steps or call('ZCOUNT', ended, '-inf', through) > 0
end
