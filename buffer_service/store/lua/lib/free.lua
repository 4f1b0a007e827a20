-- Freeing what replays no longer need, in portions.

-- @include batches
-- @include remembered

-- What one script takes on: few enough that it holds the store up for milliseconds only.
local VICTIMS = 256

local function forget_tasks(task_ids)
  remember(task_ids)
  call_many('HDEL', TASKS, task_ids)
  call_many('HDEL', key('specs'), task_ids)
end

local function free_groups(groups)
  local payloads, task_ids = {}, {}
  for index, group in ipairs(groups) do
    payloads[index], task_ids[index] = group[G_PAYLOAD], group[G_TASK]
  end
  call_many('SADD', TRASH, payloads)
  forget_tasks(task_ids)
end

-- Frees up to about VICTIMS groups and tombstones that may be freed; returns whether more are left. Writes the run.
local function free_some()
  local freed = 0
  local before = state.freed_steps
  while freed < VICTIMS and state.freed_steps < state.checkpointed_steps do
    local header = load_step(state.freed_steps)
    if header then
      freed = freed + dismantle(state.freed_steps, header, VICTIMS - freed, free_groups)
    end
    if header and header.rounds > 0 then
      save_step(state.freed_steps, header)
    else
      delete_step(state.freed_steps)
      state.freed_steps = state.freed_steps + 1
      freed = freed + 1
    end
  end
  local ended, through = key('ended'), format('%d', state.ended_through)
  local tombs = call('ZRANGEBYSCORE', ended, '-inf', through, 'LIMIT', 0, math.max(0, VICTIMS - freed))
  if #tombs > 0 then
    forget_tasks(tombs)
    call_many('ZREM', ended, tombs)
  end
  if state.freed_steps ~= before then
    write_run()
  end
  return state.freed_steps < state.checkpointed_steps or call('ZCOUNT', ended, '-inf', through) > 0
end
