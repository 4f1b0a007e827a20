-- Leases pending tasks to a worker.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, worker_id, instance_id, request_id, engine_id, loaded_epoch, loaded_version, max_tasks,
--         message_bytes}: what one reply can carry
-- Replies {'leased', revision, wait ('' for none), required_version, ttl_ms, epoch, version, grants}; a grant is
--         {task_id, generation, attempt, spec, payload key of the continuation ('' for none)}
--       | {'more'}: much of what the worker's former process held was returned; call again
--       | {'error', 'unknown_run' | 'store_rolled_back', ...}
-- Complexity O(environments + classes + (max_tasks + due) * log tasks)

-- @include admission

local request = unpack_msg(ARGV[1])
local seen, worker_id, instance_id, request_id, engine_id = unpack(request, 1, 5)
local loaded_epoch, loaded_version, max_tasks, message_bytes = unpack(request, 6, 9)

-- Leases that one call ends, and tasks whose back-off it ends: few enough that it holds the store up for milliseconds
-- only.
local PORTION = 256

relieve()
local refusal = open_run(seen)
if refusal then
  return refusal
end
call('HSET', RUN, 'asked', format('%d', now))
call('ZADD', key('workers_heard'), format('%d', now), worker_id)
expire_leases(100)

local held = key('held:' .. worker_id)
local raw_worker = call('HGET', key('workers'), worker_id)
local worker = raw_worker and unpack_msg(raw_worker) or {'', '', {}}

local function save_worker()
  call('HSET', key('workers'), worker_id, pack(worker))
end

local function answer(wait, required, grants)
  return reply('leased', close_run(), wait, required, policy.lease_ttl_ms, state.epoch, state.version, grants)
end

local function grant_of(task_id, task)
  return {task_id, task.generation, task.attempt, call('HGET', key('specs'), task_id) or '', task.payload}
end

-- A new process of the worker: what the old one held is returned.
if worker[1] ~= instance_id then
  local members = call('SMEMBERS', held)
  table.sort(members)
  local returned = 0
  for _, member in ipairs(members) do
    local task_id = entry_task_id(member)
    local task = load_task(task_id)
    if live_expiry(task_id, task, task.generation, task.attempt) then
      stat('leases_returned', 1)
      reopen_task(task_id, task, now)
      returned = returned + 1
      if returned == PORTION then
        close_run()
        return reply('more')
      end
    end
  end
  worker = {instance_id, '', {}}
  save_worker()
end

if request_id ~= '' and worker[2] == request_id then
  local grants = {}
  for _, given in ipairs(worker[3]) do
    local task = load_task(given[1])
    if task and task.worker == worker_id and live_expiry(given[1], task, given[2], given[3]) then
      grants[#grants + 1] = grant_of(given[1], task)
    end
  end
  return answer('', 0, grants)
end

if state.paused ~= '' then
  return answer('paused', 0, {})
elseif state.draining then
  return answer('draining', 0, {})
end
local engine = call('HGET', key('engines'), engine_id)
if engine and unpack_msg(engine)[3] == 'quarantined' then
  return answer('quarantined', 0, {})
end
local train_version = next_train_version()
local gated = policy.max_staleness >= 0
local loaded = effective(loaded_epoch, loaded_version)
if gated and loaded < train_version - policy.max_staleness then
  return answer('engine_stale', math.max(0, train_version - policy.max_staleness), {})
end

local exists = existing_groups()
local fresh_room, room = lease_room(exists, 0), lease_room(exists, state.version - loaded)

-- Gives up a task's continuation where it is too stale to be trained, or too far from the weights it would go on with.
local function check_continuation(task)
  local head = effective(task.head_epoch, task.head)
  if gated and train_version - head > policy.max_staleness then
    discard_continuation(task)
  elseif policy.max_version_spread >= 0 and loaded - head > policy.max_version_spread then
    stat('continuations_beyond_spread', 1)
    discard_continuation(task)
  end
end

-- Of the payloads that a lease of the task carries. A payload key ends in its payload's size.
local function lease_bytes(task_id, task)
  return call('HSTRLEN', key('specs'), task_id) + (tonumber(string.match(task.payload, '%d+$')) or 0)
end

promote_due(math.max(PORTION, max_tasks))
local members, picking = {}, nil
if room > 0 then
  members, picking = pick_pending(math.min(room, max_tasks))
end
local grants, given = {}, {}
local bytes, full = 0, false
local expiry = format('%d', now + policy.lease_ttl_ms)
for index, member in ipairs(members) do
  local task_id = entry_task_id(member)
  local task = load_task(task_id)
  local size = lease_bytes(task_id, task)
  if index > 1 and bytes + size > message_bytes / 2 then
    full = true
    break
  end
  bytes = bytes + size
  if size > message_bytes then
    discard_continuation(task)
  end
  if task.head >= 0 then
    check_continuation(task)
  end
  unindex_task(task_id, task)
  move_task(task, 'leased')
  task.attempt, task.worker, task.instance = task.attempt + 1, worker_id, instance_id
  task.lease_epoch, task.lease_head, task.granted = state.epoch, loaded, now
  if task.head >= 0 then
    task.lease_head = math.min(loaded, effective(task.head_epoch, task.head))
  end
  call('ZADD', LEASES, expiry, member)
  call('SADD', held, member)
  save_task(task_id, task)
  grants[index] = grant_of(task_id, task)
  given[index] = {task_id, task.generation, task.attempt}
end

close_picking(picking, #grants)

local wait, required = '', 0
if #grants > 0 then
  stat('leases_granted', #grants)
  worker = {instance_id, request_id, given}
  save_worker()
end
if #grants < max_tasks and not full then
  if #grants == fresh_room then
    wait = 'at_capacity'
  elseif pending_count() > call('ZCARD', DELAYED) then
    -- There is room for an engine that has the published weights, and a task.
    wait, required = 'engine_stale', required_version(exists, exists.forming + exists.queued + exists.leased + #grants)
  elseif call('ZCARD', DELAYED) > 0 then
    wait = 'backing_off'
  else
    wait = 'no_tasks'
  end
end
return answer(wait, required, grants)
