-- Committing steps, and freeing what replays no longer need.

-- @include batches

local VICTIMS = 1000

-- Forgets publishes that no resume can go back to: all before the newest one at or before checkpointed_steps.
local function prune_publishes()
  local commits, manifests = key('commits'), key('manifests')
  local floor_entry = call('ZREVRANGEBYSCORE', commits, format('%d', state.checkpointed_steps), '-inf',
    'WITHSCORES', 'LIMIT', 0, 1)
  if not floor_entry[1] then
    return
  end
  local oldest = tonumber(floor_entry[1])
  call('ZREMRANGEBYSCORE', commits, '-inf', '(' .. floor_entry[2])
  for _, version in ipairs(call('HKEYS', manifests)) do
    if tonumber(version) < oldest then
      call('HDEL', manifests, version)
    end
  end
end

-- Steps below `steps`, and the tombstones of tasks that have ended outside of steps, may be freed from now on.
local function release_steps(steps)
  if steps > state.checkpointed_steps then
    state.checkpointed_steps = steps
    changed = true
    prune_publishes()
  end
  if state.ended_through < state.ended_sequence and call('ZCARD', key('ended')) > 0 then
    state.ended_through = state.ended_sequence
    changed = true
  end
end

local function forget_tasks(task_ids)
  if #task_ids > 0 then
    call_many('HDEL', TASKS, task_ids)
    call_many('HDEL', key('specs'), task_ids)
  end
end

-- Frees one chunk of a released step, the last one of its last rank; returns the groups freed.
local function free_chunk(step, header)
  local rank = #header.ranks
  local chunks = header.ranks[rank][2]
  local freed = 0
  if chunks > 0 then
    local field = chunk_field(step, rank - 1, chunks - 1)
    local payloads, task_ids = {}, {}
    for index, group in ipairs(unpack_msg(call('HGET', CHUNKS, field))) do
      payloads[index], task_ids[index] = group[G_PAYLOAD], group[G_TASK]
    end
    freed = #payloads
    call_many('SADD', TRASH, payloads)
    forget_tasks(task_ids)
    call('HDEL', CHUNKS, field)
    header.ranks[rank][2] = chunks - 1
  else
    header.ranks[rank] = nil
  end
  return freed
end

-- Frees up to about VICTIMS groups and tombstones that may be freed; returns whether more are left. Writes the run.
local function free_some()
  local freed = 0
  local before = state.freed_steps
  while freed < VICTIMS and state.freed_steps < state.checkpointed_steps do
    local header = load_step(state.freed_steps)
    while header and #header.ranks > 0 and freed < VICTIMS do
      freed = freed + free_chunk(state.freed_steps, header)
    end
    if header and #header.ranks > 0 then
      save_step(state.freed_steps, header)
    else
      call('HDEL', STEPS, format('%d', state.freed_steps))
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

-- Settles the steps below `steps` as trained, and frees what is beyond retention.
local function commit_steps(steps)
  if steps <= state.committed_steps then
    return
  end
  for step = state.committed_steps, steps - 1 do
    move_step(load_step(step), 'delivered', 'trained')
  end
  state.committed_steps = steps
  if steps - policy.retained_steps > state.checkpointed_steps then
    release_steps(steps - policy.retained_steps)
  end
end
