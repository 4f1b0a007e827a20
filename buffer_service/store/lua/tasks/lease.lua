-- Leases pending tasks to a worker: those of the queue, by admission, or those of evaluations that are pinned to the
-- version that its engine has.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, worker_id, instance_id, request_id, engine_id, loaded_term, loaded_version, max_tasks,
--         message_bytes, sink ('queue' | 'evaluations'), would_load (1 or 0)}; message_bytes: what one reply can carry
-- Replies {'leased', revision, wait ('' for none), required_version, ttl_ms, term, version, grants, wanted,
--         limited_environment, limited_for_ms (Pending.first_of where the wait is 'rate_limited')}; a grant
--         is {task_id, incarnation, attempt, spec, payload key of the partial rollout ('' for none), name, pinned};
--         name: the id that the trainer gave the task; pinned is {} or {term, version}, wanted {} or {term, version,
--         manifest ('' for none)}
--       | {'more'}: much of what the worker's former process held was returned; call again
--       | {'error', 'unknown_run' | 'store_rolled_back', ...}
-- Complexity O(environments + subqueues + evaluations + (max_tasks + due) * log tasks)

-- @include admission
-- @include fresh_start

local ctx = Run.context()
local request = unpack_msg(ARGV[1])
local worker_id, instance_id, request_id, engine_id, loaded_term, loaded_version = unpack(request, 2, 7)
local max_tasks, message_bytes, sink = unpack(request, 8, 10)
local is_evaluation = sink == 'evaluations'
if not is_evaluation and sink ~= 'queue' then
  error('unknown sink ' .. sink)
end

-- Leases that one call ends, and tasks whose back-off it ends: few enough that it holds the store up for milliseconds
-- only.
local PORTION = 256

Run.relieve()
local refusal = Run.open(ctx, request[1])
if refusal then
  return refusal
end
local state, policy = ctx.state, ctx.policy
if not is_evaluation then
  call('HSET', RUN, 'asked', format('%d', ctx.now))
end
call('ZADD', key('workers_heard'), format('%d', ctx.now), worker_id)
Tasks.expire_leases(ctx, is_evaluation and 'eval_leases' or 'leases', 100)

local held = key('held:' .. worker_id)
local worker = call('HGET', key('workers'), worker_id)
-- The process, and for each sink the last request that was granted something, with what: {id, {{task_id, incarnation,
-- attempt}, ...}}.
worker = worker and unpack_msg(worker) or {'', {}}

local function save_worker(granted)
  worker = {instance_id, granted}
  call('HSET', key('workers'), worker_id, pack(worker))
end

local function answer(wait, required, grants, wanted, limited)
  local environment, for_ms = Pending.first_of(ctx, limited or {})
  return reply('leased', Run.close(ctx), wait, required, policy.lease_ttl_ms, state.term, state.version, grants,
    wanted or {}, environment, for_ms)
end

-- A new process of the worker: what the old one held is returned.
if worker[1] ~= instance_id then
  local members = call('SMEMBERS', held)
  table.sort(members)
  local returned = 0
  for _, member in ipairs(members) do
    local task_id = Tasks.id_of_entry(member)
    local task = Tasks.load(task_id)
    if task and Tasks.live_expiry(ctx, task_id, task, task.incarnation, task.attempt) then
      Tasks.count(ctx, task, 'leases_returned')
      Tasks.reopen(ctx, task_id, task, ctx.now)
      returned = returned + 1
      if returned == PORTION then
        Run.close(ctx)
        return reply('more')
      end
    end
  end
  save_worker({})
end

local last = worker[2][sink]
if request_id ~= '' and last and last[1] == request_id then
  local grants = {}
  for _, given in ipairs(last[2]) do
    local task = Tasks.load(given[1])
    if task and task.worker == worker_id and Tasks.live_expiry(ctx, given[1], task, given[2], given[3]) then
      grants[#grants + 1] = Tasks.grant_of(given[1], task)
    end
  end
  return answer('', 0, grants)
end

if state.paused ~= '' then
  return answer('paused', 0, {})
elseif state.draining and not is_evaluation then
  return answer('draining', 0, {})
end
local engine = call('HGET', key('engines'), engine_id)
if engine and unpack_msg(engine)[3] == 'quarantined' then
  return answer('quarantined', 0, {})
end
local train_version = Timeline.first_train_version(ctx)
local loaded = Timeline.effective(ctx, loaded_term, loaded_version)

-- Gives up a task's partial rollout where it is too stale to be trained, or too far from the weights it would go on
-- with.
local function check_partial_rollout(task)
  local head = Timeline.effective(ctx, task.head_term, task.head)
  if policy.max_staleness >= 0 and train_version - head > policy.max_staleness then
    Tasks.discard_partial_rollout(ctx, task)
  elseif policy.max_version_spread >= 0 and loaded - head > policy.max_version_spread then
    Run.count(ctx, 'partial_rollouts_beyond_spread', 1)
    Tasks.discard_partial_rollout(ctx, task)
  end
end

-- Leases a task.
local function lease(task_id, task)
  local member = Tasks.entry(task_id, task)
  if task.head >= 0 then
    check_partial_rollout(task)
  end
  Tasks.unindex(ctx, task_id, task)
  Tasks.move(ctx, task, 'leased')
  task.attempt, task.worker, task.instance = task.attempt + 1, worker_id, instance_id
  task.lease_term, task.lease_head, task.granted = state.term, loaded, ctx.now
  if task.head >= 0 then
    task.lease_head = math.min(loaded, Timeline.effective(ctx, task.head_term, task.head))
  end
  call('ZADD', Tasks.leases_of(task), format('%d', ctx.now + policy.lease_ttl_ms), member)
  call('SADD', held, member)
  if not task.evaluation then
    Pending.take(ctx, task.environment)
    if Tasks.heads_are_awaited(ctx) then
      call('ZADD', key('lease_heads'), format('%d', task.lease_head), member)
    end
    if policy.order == 'submission' then
      Tasks.turn(ctx, task)
    end
    if Tasks.turns_are_awaited(ctx) then
      call('ZADD', key('lease_turns'), format('%d', task.turn), member)
    end
  end
  Tasks.save(task_id, task)
end

-- Leases these tasks, as far as the message has room for them. Returns the grants, and whether it had no more room.
local function lease_all(task_ids)
  local grants, given, bytes, is_full = {}, {}, 0, false
  for index, task_id in ipairs(task_ids) do
    local task = Tasks.load(task_id)
    local size = Tasks.lease_bytes(task_id, task)
    if index > 1 and bytes + size > message_bytes / 2 then
      is_full = true
      break
    end
    bytes = bytes + size
    if size > message_bytes then
      Tasks.discard_partial_rollout(ctx, task)
    end
    lease(task_id, task)
    grants[index] = Tasks.grant_of(task_id, task)
    given[index] = {task_id, task.incarnation, task.attempt}
  end
  if #grants > 0 then
    local granted = worker[2]
    granted[sink] = {request_id, given}
    save_worker(granted)
  end
  return grants, is_full
end

local function lease_of_evaluations()
  local task_ids, is_backing_off, oldest, other = Evaluations.pick(ctx, loaded_term, loaded_version, max_tasks)
  local grants, is_full = lease_all(task_ids)
  local wait, target = '', other
  if is_full then
    -- Others are due: the worker asks again at once.
    wait = ''
  elseif is_backing_off then
    wait = 'backing_off'
  elseif #grants == 0 and other and max_tasks > 0 then
    wait = 'engine_stale'
  elseif #grants < max_tasks or not oldest then
    wait = 'no_tasks'
  end
  if max_tasks == 0 then
    target = oldest
  elseif #grants > 0 or is_backing_off then
    target = nil
  end
  return answer(wait, 0, grants, request[11] == 1 and target and Evaluations.weights_of(target))
end

local function lease_of_queue()
  if policy.max_staleness >= 0 and loaded < train_version - policy.max_staleness then
    return answer('engine_stale', math.max(0, train_version - policy.max_staleness), {})
  end
  if loaded < state.version and FreshStart.is_due(ctx, engine_id) then
    return answer('engine_stale', state.version, {})
  end
  Tasks.promote_due(ctx, math.max(PORTION, max_tasks))
  local exists = Admission.existing(ctx)
  local room = Admission.room(ctx, exists, state.version - loaded)
  if policy.max_staleness >= 0 and loaded < Timeline.train_version_of(ctx, state.next_step) - policy.max_staleness then
    -- What it begins is fresh enough for a step that lacks groups alone.
    room = math.max(0, math.min(room, exists.missing - exists.queued - exists.leased))
  end
  local task_ids, picking, limited = {}, nil, {}
  if room > 0 then
    local members
    members, picking, limited = Pending.pick(ctx, math.min(room, max_tasks))
    for index, member in ipairs(members) do
      task_ids[index] = Tasks.id_of_entry(member)
    end
  end
  local grants, is_full = lease_all(task_ids)
  Picking.close(picking, #grants)
  if #grants > 0 then
    Run.count(ctx, 'leases_granted', #grants)
  end
  if #grants == max_tasks or is_full then
    return answer('', 0, grants)
  elseif #grants == Admission.room(ctx, exists, 0) then
    if ctx.policy ~= ctx.stated then
      Admission.note_held(ctx, exists, #grants)
    end
    return answer('at_capacity', 0, grants)
  elseif #grants < room and #limited > 0 then
    return answer('rate_limited', 0, grants, nil, limited)
  elseif Pending.count(ctx) > call('ZCARD', key('delayed')) then
    -- There is room for an engine that has the published weights, and a task.
    local existing = exists.forming + exists.queued + exists.leased
    return answer('engine_stale', Admission.required_version(ctx, exists, existing + #grants), grants)
  end
  return answer(call('ZCARD', key('delayed')) > 0 and 'backing_off' or 'no_tasks', 0, grants)
end

return is_evaluation and lease_of_evaluations() or lease_of_queue()
