-- Leases tasks of evaluations to a worker, whose engine has exactly the version that they want.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, worker_id, instance_id, request_id, engine_id, loaded_epoch, loaded_version, max_tasks,
--         would_load (1 or 0)}
-- Replies {'leased', revision, wait ('' for none), ttl_ms, grants, wanted}; a grant is {lease_id, task_id, epoch,
--         version, attempt, spec}; wanted is {} or {epoch, version, manifest ('' for none)}
--       | {'more'}: much of what the worker's former process held was returned; call again
--       | {'error', 'unknown_run' | 'store_rolled_back', ...}
-- Complexity O(evaluations + max_tasks * log tasks)

-- @include evaluations

local ctx = Run.context()
local request = unpack_msg(ARGV[1])
local seen, worker_id, instance_id, request_id, engine_id = unpack(request, 1, 5)
local loaded_epoch, loaded_version, max_tasks, would_load = unpack(request, 6, 9)

-- Leases that one call ends.
local PORTION = 256

Run.relieve()
local refusal = Run.open(ctx, seen)
if refusal then
  return refusal
end
local policy = ctx.policy
Evaluations.expire_leases(ctx, 100)

local held = key('eval_held:' .. worker_id)
local raw_worker = call('HGET', key('eval_workers'), worker_id)
local worker = raw_worker and unpack_msg(raw_worker) or {instance_id, '', {}}

local function answer(wait, grants, target)
  return reply('leased', Run.close(ctx), wait, policy.lease_ttl_ms, grants, target)
end

local function grant_of(eval_id, evaluation, index, task)
  local spec = call('HGET', Evaluations.key_of('specs', evaluation.number), format('%d', index))
  local lease_id = Evaluations.lease_id_of(eval_id, evaluation, index, task)
  return {lease_id, task.task_id, evaluation.epoch, evaluation.version, task.attempt, spec}
end

-- A new process of the worker: what the old one held is pending again.
if worker[1] ~= instance_id then
  local members = call('SMEMBERS', held)
  table.sort(members)
  Evaluations.for_leases(ctx, {unpack(members, 1, PORTION)}, function(eval_id, evaluation, index, task)
    Evaluations.reopen_task(ctx, eval_id, evaluation, index, task, 0)
    Evaluations.save_task(ctx, evaluation, index, task)
  end)
  if #members > PORTION then
    Run.close(ctx)
    return reply('more')
  end
  worker = {instance_id, '', {}}
end

if worker[2] == request_id then
  local grants = {}
  for _, given in ipairs(worker[3]) do
    local eval_id, number, index, attempt = unpack(given, 1, 4)
    local evaluation, task = Evaluations.find_leased(eval_id, number, index)
    if evaluation and Evaluations.is_live(ctx, eval_id, evaluation, index, task, attempt, worker_id, instance_id) then
      grants[#grants + 1] = grant_of(eval_id, evaluation, index, task)
    end
  end
  return answer('', grants, {})
end

if ctx.state.paused ~= '' then
  return answer('paused', {}, {})
end
local engine = call('HGET', key('engines'), engine_id)
if engine and unpack_msg(engine)[3] == 'quarantined' then
  return answer('quarantined', {}, {})
end

local grants, given = {}, {}
local expiry = format('%d', ctx.now + policy.lease_ttl_ms)

local function grant(eval_id, evaluation, member)
  local index = tonumber(member)
  local task = Evaluations.load_task(evaluation, index)
  task.state, task.attempt, task.worker, task.instance = 'leased', task.attempt + 1, worker_id, instance_id
  local lease = Evaluations.lease_member(eval_id, evaluation, index, worker_id)
  call('ZADD', key('eval_leases'), expiry, lease)
  call('SADD', held, lease)
  Evaluations.save_task(ctx, evaluation, index, task)
  grants[#grants + 1] = grant_of(eval_id, evaluation, index, task)
  given[#given + 1] = {eval_id, evaluation.number, index, task.attempt}
end

-- The oldest evaluation with pending tasks, the oldest of another version, and whether some of this one back off.
local oldest, other, is_backing_off
for _, eval_id in ipairs(call('ZRANGE', key('eval_open'), 0, -1)) do
  local evaluation = Evaluations.load(eval_id)
  oldest = oldest or evaluation
  if evaluation.epoch == loaded_epoch and evaluation.version == loaded_version then
    local pending = Evaluations.key_of('pending', evaluation.number)
    local left = max_tasks - #grants
    if left > 0 then
      local due = call('ZRANGEBYSCORE', pending, '-inf', format('%d', ctx.now), 'LIMIT', 0, left)
      for _, member in ipairs(due) do
        grant(eval_id, evaluation, member)
      end
      Evaluations.unqueue_tasks(eval_id, evaluation, due)
      is_backing_off = is_backing_off or (#due < left and call('EXISTS', pending) == 1)
    end
  else
    other = other or evaluation
  end
end
if #grants > 0 then
  call('HSET', key('eval_workers'), worker_id, pack({instance_id, request_id, given}))
end

local wait = ''
if is_backing_off then
  wait = 'backing_off'
elseif #grants == 0 and other and max_tasks > 0 then
  wait = 'engine_stale'
elseif #grants < max_tasks or not oldest then
  wait = 'no_tasks'
end
local target = other
if max_tasks == 0 then
  target = oldest
elseif #grants > 0 or is_backing_off then
  target = nil
end
if would_load == 0 or not target then
  return answer(wait, grants, {})
end
local manifest = call('HGET', key('eval_manifests'), format('%d', target.number)) or ''
return answer(wait, grants, {target.epoch, target.version, manifest})
