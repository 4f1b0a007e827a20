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

local ctx = Run.context()
local seen, worker_id, instance_id, request_id, engine_id, loaded_epoch, loaded_version, max_tasks, message_bytes =
  unpack(unpack_msg(ARGV[1]), 1, 9)

-- Leases that one call ends, and tasks whose back-off it ends: few enough that it holds the store up for milliseconds
-- only.
local PORTION = 256

Run.relieve()
local refusal = Run.open(ctx, seen)
if refusal then
  return refusal
end
local state, policy = ctx.state, ctx.policy
call('HSET', RUN, 'asked', format('%d', ctx.now))
call('ZADD', key('workers_heard'), format('%d', ctx.now), worker_id)
Tasks.expire_leases(ctx, 100)

local held = key('held:' .. worker_id)
local worker = call('HGET', key('workers'), worker_id)
worker = worker and unpack_msg(worker) or {'', '', {}}

-- Remembers the process and what its last request was granted.
local function save_worker(request, given)
  worker = {instance_id, request, given}
  call('HSET', key('workers'), worker_id, pack(worker))
end

local function answer(wait, required, grants)
  return reply('leased', Run.close(ctx), wait, required, policy.lease_ttl_ms, state.epoch, state.version, grants)
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
    local task_id = Tasks.id_of_entry(member)
    local task = Tasks.load(task_id)
    if Tasks.live_expiry(ctx, task_id, task, task.generation, task.attempt) then
      Run.count(ctx, 'leases_returned', 1)
      Tasks.reopen(ctx, task_id, task, ctx.now)
      returned = returned + 1
      if returned == PORTION then
        Run.close(ctx)
        return reply('more')
      end
    end
  end
  save_worker('', {})
end

if request_id ~= '' and worker[2] == request_id then
  local grants = {}
  for _, given in ipairs(worker[3]) do
    local task = Tasks.load(given[1])
    if task and task.worker == worker_id and Tasks.live_expiry(ctx, given[1], task, given[2], given[3]) then
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
local train_version = Timeline.next_train_version(ctx)
local loaded = Timeline.effective(ctx, loaded_epoch, loaded_version)
if policy.max_staleness >= 0 and loaded < train_version - policy.max_staleness then
  return answer('engine_stale', math.max(0, train_version - policy.max_staleness), {})
end

local exists = Admission.existing(ctx)
local room = Admission.room(ctx, exists, state.version - loaded)

-- Gives up a task's continuation where it is too stale to be trained, or too far from the weights it would go on with.
local function check_continuation(task)
  local head = Timeline.effective(ctx, task.head_epoch, task.head)
  if policy.max_staleness >= 0 and train_version - head > policy.max_staleness then
    Tasks.discard_continuation(ctx, task)
  elseif policy.max_version_spread >= 0 and loaded - head > policy.max_version_spread then
    Run.count(ctx, 'continuations_beyond_spread', 1)
    Tasks.discard_continuation(ctx, task)
  end
end

-- Of the payloads that a lease of the task carries. A payload key ends in its payload's size.
local function lease_bytes(task_id, task)
  return call('HSTRLEN', key('specs'), task_id) + (tonumber(string.match(task.payload, '%d+$')) or 0)
end

-- Leases a task, whose entry this is.
local function lease(member, task_id, task)
  if task.head >= 0 then
    check_continuation(task)
  end
  Tasks.unindex(ctx, task_id, task)
  Ledger.move_task(ctx, task, 'leased')
  task.attempt, task.worker, task.instance = task.attempt + 1, worker_id, instance_id
  task.lease_epoch, task.lease_head, task.granted = state.epoch, loaded, ctx.now
  if task.head >= 0 then
    task.lease_head = math.min(loaded, Timeline.effective(ctx, task.head_epoch, task.head))
  end
  call('ZADD', key('leases'), format('%d', ctx.now + policy.lease_ttl_ms), member)
  call('SADD', held, member)
  Tasks.save(task_id, task)
end

-- Leases what there is room for. Returns the grants, and whether the message had no room for more.
local function lease_tasks()
  local members, picking = {}, nil
  if room > 0 then
    members, picking = Pending.pick(ctx, math.min(room, max_tasks))
  end
  local grants, given, bytes, is_full = {}, {}, 0, false
  for index, member in ipairs(members) do
    local task_id = Tasks.id_of_entry(member)
    local task = Tasks.load(task_id)
    local size = lease_bytes(task_id, task)
    if index > 1 and bytes + size > message_bytes / 2 then
      is_full = true
      break
    end
    bytes = bytes + size
    if size > message_bytes then
      Tasks.discard_continuation(ctx, task)
    end
    lease(member, task_id, task)
    grants[index] = grant_of(task_id, task)
    given[index] = {task_id, task.generation, task.attempt}
  end
  Picking.close(picking, #grants)
  if #grants > 0 then
    Run.count(ctx, 'leases_granted', #grants)
    save_worker(request_id, given)
  end
  return grants, is_full
end

-- What brings another lease where only so many were given, and the version that it needs (0: none).
local function wait_after(granted)
  if granted == Admission.room(ctx, exists, 0) then
    return 'at_capacity', 0
  elseif Pending.count(ctx) > call('ZCARD', key('delayed')) then
    -- There is room for an engine that has the published weights, and a task.
    local existing = exists.forming + exists.queued + exists.leased
    return 'engine_stale', Admission.required_version(ctx, exists, existing + granted)
  end
  return call('ZCARD', key('delayed')) > 0 and 'backing_off' or 'no_tasks', 0
end

Tasks.promote_due(ctx, math.max(PORTION, max_tasks))
local grants, is_full = lease_tasks()
if #grants < max_tasks and not is_full then
  local wait, required = wait_after(#grants)
  return answer(wait, required, grants)
end
return answer('', 0, grants)
