-- Evaluations: tasks that are generated at one weight version, beside the training. Nothing here touches the ledgers.
--
-- Keys: hash `evals` (by id: record), hash `eval_manifests` (by number: how to load the version), zset `eval_open`
-- (score: number; ids of those with pending tasks), zset `eval_leases` (score: expiry; member: lease_member), hash
-- `eval_workers` (by worker, while it holds leases: {instance, last request, what that was granted}), set
-- `eval_held:<worker>` (its lease members), set `eval_deleting` (numbers, Burial); RUN field eval_bytes (stored
-- for all of them). Of each evaluation, named by its number so that a deleted one is never taken for a later one of the
-- same id: hash `eval_tasks:<n>` (by index: task), hash `eval_specs:<n>` (of those without a result), zset
-- `eval_pending:<n>` (score: not_before, 0 for at once; member: index, fixed width), list `eval_ended:<n>` (indexes).
--
-- Record: number, epoch, version, digest, created_ms, tasks, finished, failed, bytes, failures (indexes of the first
-- failed ones). Task: task_id, group_size, spec_bytes, state, attempt, failures, worker, instance, error, payload (key
-- of the result), accepted (its attempt; 0: none).

-- @include run

local Evaluations = {}

function Evaluations.key_of(kind, number)
  return key('eval_' .. kind .. ':' .. format('%d', number))
end

function Evaluations.load(eval_id)
  local raw = call('HGET', key('evals'), eval_id)
  return raw and unpack_msg(raw) or nil
end

function Evaluations.save(ctx, eval_id, evaluation)
  call('HSET', key('evals'), eval_id, pack(evaluation))
  ctx.changed = true
end

function Evaluations.load_task(evaluation, index)
  local raw = call('HGET', Evaluations.key_of('tasks', evaluation.number), format('%d', index))
  return raw and unpack_msg(raw) or nil
end

function Evaluations.save_task(ctx, evaluation, index, task)
  call('HSET', Evaluations.key_of('tasks', evaluation.number), format('%d', index), pack(task))
  ctx.changed = true
end

function Evaluations.lease_id_of(eval_id, evaluation, index, task)
  return format('%s/%d/%d/%d', eval_id, evaluation.number, index, task.attempt)
end

function Evaluations.lease_member(eval_id, evaluation, index, worker_id)
  return format('%d/%s/%d/%s', evaluation.number, eval_id, index, worker_id)
end

-- Splits "eval_id/number/index/attempt"; nil when malformed.
function Evaluations.parse_lease_id(id)
  local eval_id, number, index, attempt = string.match(id, '^([^/]+)/(%d+)/(%d+)/([1-9]%d*)$')
  if not eval_id or #number > 15 or #index > 4 or #attempt > 15 then
    return nil
  end
  return eval_id, tonumber(number), tonumber(index), tonumber(attempt)
end

-- The evaluation and the task that a lease is or was of; nil when either is gone.
function Evaluations.find_leased(eval_id, number, index)
  local evaluation = Evaluations.load(eval_id)
  if not evaluation or evaluation.number ~= number then
    return nil
  end
  return evaluation, Evaluations.load_task(evaluation, index)
end

-- True when this attempt of the task is leased by this process and not past its expiry.
function Evaluations.is_live(ctx, eval_id, evaluation, index, task, attempt, worker_id, instance_id)
  if task.state ~= 'leased' or task.attempt ~= attempt or task.worker ~= worker_id or task.instance ~= instance_id then
    return false
  end
  local member = Evaluations.lease_member(eval_id, evaluation, index, worker_id)
  return tonumber(call('ZSCORE', key('eval_leases'), member)) >= ctx.now
end

-- A lease leaves the indexes; the record of a worker without leases goes.
function Evaluations.drop_lease(ctx, member, worker_id)
  local held = key('eval_held:' .. worker_id)
  call('ZREM', key('eval_leases'), member)
  call('SREM', held, member)
  if call('EXISTS', held) == 0 then
    call('HDEL', key('eval_workers'), worker_id)
  end
  ctx.changed = true
end

function Evaluations.queue_task(ctx, eval_id, evaluation, index, not_before)
  call('ZADD', Evaluations.key_of('pending', evaluation.number), format('%d', not_before), format('%05d', index))
  call('ZADD', key('eval_open'), format('%d', evaluation.number), eval_id)
  ctx.topics.evaluations = true
end

-- Takes tasks out of what is pending.
function Evaluations.unqueue_tasks(eval_id, evaluation, members)
  local pending = Evaluations.key_of('pending', evaluation.number)
  call_many('ZREM', pending, members)
  if call('EXISTS', pending) == 0 then
    call('ZREM', key('eval_open'), eval_id)
  end
end

-- What is stored for the evaluation changes by so many bytes.
function Evaluations.store_bytes(evaluation, bytes)
  evaluation.bytes = evaluation.bytes + bytes
  call('HINCRBY', RUN, 'eval_bytes', format('%d', bytes))
end

-- Ends the present lease of a task, or takes it out of what is pending.
function Evaluations.unindex_task(ctx, eval_id, evaluation, index, task)
  if task.state == 'leased' then
    Evaluations.drop_lease(ctx, Evaluations.lease_member(eval_id, evaluation, index, task.worker), task.worker)
  else
    Evaluations.unqueue_tasks(eval_id, evaluation, {format('%05d', index)})
  end
  task.worker, task.instance = '', ''
end

-- A task has ended: `to` is 'finished' or 'failed', `bytes` the size of what is kept of it.
function Evaluations.end_task(ctx, eval_id, evaluation, index, task, to, bytes)
  Evaluations.unindex_task(ctx, eval_id, evaluation, index, task)
  task.state = to
  evaluation[to] = evaluation[to] + 1
  Evaluations.store_bytes(evaluation, bytes - task.spec_bytes)
  call('HDEL', Evaluations.key_of('specs', evaluation.number), format('%d', index))
  call('RPUSH', Evaluations.key_of('ended', evaluation.number), format('%d', index))
  ctx.topics.results = true
end

-- A leased task is pending again.
function Evaluations.reopen_task(ctx, eval_id, evaluation, index, task, not_before)
  Evaluations.unindex_task(ctx, eval_id, evaluation, index, task)
  task.state = 'pending'
  Evaluations.queue_task(ctx, eval_id, evaluation, index, not_before)
end

-- A lease ended in an error: back-off, or the end of the task. Returns true when the task has failed.
function Evaluations.fail_attempt(ctx, eval_id, evaluation, index, task, why)
  task.failures = task.failures + 1
  task.error = string.sub(why, 1, 2000)
  local is_over = task.failures >= MAX_EVAL_ATTEMPTS
  if is_over then
    Evaluations.end_task(ctx, eval_id, evaluation, index, task, 'failed', 0)
    if #evaluation.failures < EVAL_FAILURES_SHOWN then
      evaluation.failures[#evaluation.failures + 1] = index
    end
  else
    local backoff = ctx.policy.retry_backoff_ms * 2 ^ math.min(task.failures - 1, 6)
    Evaluations.reopen_task(ctx, eval_id, evaluation, index, task, ctx.now + backoff)
  end
  Evaluations.save_task(ctx, evaluation, index, task)
  Evaluations.save(ctx, eval_id, evaluation)
  return is_over
end

-- Calls each(eval_id, evaluation, index, task) for the leases of these members, and drops those of deleted evaluations.
function Evaluations.for_leases(ctx, members, each)
  for _, member in ipairs(members) do
    local number, eval_id, index, worker_id = string.match(member, '^(%d+)/([^/]+)/(%d+)/(.+)$')
    local evaluation, task = Evaluations.find_leased(eval_id, tonumber(number), tonumber(index))
    if evaluation then
      each(eval_id, evaluation, tonumber(index), task)
    else
      Evaluations.drop_lease(ctx, member, worker_id)
    end
  end
end

-- Ends leases that are past their expiry, at most `limit`; returns how many.
function Evaluations.expire_leases(ctx, limit)
  local due = call('ZRANGEBYSCORE', key('eval_leases'), '-inf', format('(%d', ctx.now), 'LIMIT', 0, limit)
  Evaluations.for_leases(ctx, due, function(eval_id, evaluation, index, task)
    Evaluations.fail_attempt(ctx, eval_id, evaluation, index, task, 'lease expired')
  end)
  return #due
end

-- As it is seen: {eval_id, epoch, version, tasks, pending, finished, failed, bytes, created_ms, failures}; a failure is
-- {index, task_id, attempts, error}, and there are none unless `with_failures`.
function Evaluations.view(eval_id, evaluation, with_failures)
  local failures = {}
  if with_failures then
    for at, index in ipairs(evaluation.failures) do
      local task = Evaluations.load_task(evaluation, index)
      failures[at] = {index, task.task_id, task.attempt, task.error}
    end
  end
  return {
    eval_id, evaluation.epoch, evaluation.version, evaluation.tasks,
    call('ZCARD', Evaluations.key_of('pending', evaluation.number)), evaluation.finished, evaluation.failed,
    evaluation.bytes, evaluation.created_ms, failures,
  }
end
