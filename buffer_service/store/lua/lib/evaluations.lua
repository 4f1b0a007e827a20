-- Evaluations: tasks that are generated at one weight version, beside the training. Nothing here touches the ledgers.
--
-- Keys: hash `evals` (by id: record), hash `eval_manifests` (by number: how to load the version), zset `eval_open`
-- (score: number; ids of those with pending tasks), zset `eval_leases` (score: expiry; member: lease_member), hash
-- `eval_workers` (by worker, while it holds leases: {instance, last request, what that was granted}), set
-- `eval_held:<worker>` (its lease members), set `eval_deleting` (numbers, lib/burial.lua); RUN field eval_bytes (stored
-- for all of them). Of each evaluation, named by its number so that a deleted one is never taken for a later one of the
-- same id: hash `eval_tasks:<n>` (by index: task), hash `eval_specs:<n>` (of those without a result), zset
-- `eval_pending:<n>` (score: not_before, 0 for at once; member: index, fixed width), list `eval_ended:<n>` (indexes).
--
-- Record: number, epoch, version, digest, created_ms, tasks, finished, failed, bytes, failures (indexes of the first
-- failed ones). Task: task_id, group_size, spec_bytes, state, attempt, failures, worker, instance, error, payload (key
-- of the result), accepted (its attempt; 0: none).

-- @include run
-- @include bounds

local EVALS, EVAL_OPEN, EVAL_LEASES = key('evals'), key('eval_open'), key('eval_leases')
local EVAL_WORKERS = key('eval_workers')

local function eval_key(kind, number)
  return key('eval_' .. kind .. ':' .. format('%d', number))
end

local function load_evaluation(eval_id)
  local raw = call('HGET', EVALS, eval_id)
  return raw and unpack_msg(raw) or nil
end

local function save_evaluation(eval_id, evaluation)
  call('HSET', EVALS, eval_id, pack(evaluation))
  changed = true
end

local function load_eval_task(evaluation, index)
  local raw = call('HGET', eval_key('tasks', evaluation.number), format('%d', index))
  return raw and unpack_msg(raw) or nil
end

local function save_eval_task(evaluation, index, task)
  call('HSET', eval_key('tasks', evaluation.number), format('%d', index), pack(task))
  changed = true
end

local function lease_id_of(eval_id, evaluation, index, task)
  return format('%s/%d/%d/%d', eval_id, evaluation.number, index, task.attempt)
end

local function lease_member(eval_id, evaluation, index, worker_id)
  return format('%d/%s/%d/%s', evaluation.number, eval_id, index, worker_id)
end

-- Splits "eval_id/number/index/attempt"; nil when malformed.
local function parse_eval_lease(id)
  local eval_id, number, index, attempt = string.match(id, '^([^/]+)/(%d+)/(%d+)/([1-9]%d*)$')
  if not eval_id or #number > 15 or #index > 4 or #attempt > 15 then
    return nil
  end
  return eval_id, tonumber(number), tonumber(index), tonumber(attempt)
end

-- The evaluation and the task that a lease is or was of; nil when either is gone.
local function find_leased(eval_id, number, index)
  local evaluation = load_evaluation(eval_id)
  if not evaluation or evaluation.number ~= number then
    return nil
  end
  return evaluation, load_eval_task(evaluation, index)
end

-- True when this attempt of the task is leased by this process and not past its expiry.
local function is_live_eval(eval_id, evaluation, index, task, attempt, worker_id, instance_id)
  if task.state ~= 'leased' or task.attempt ~= attempt or task.worker ~= worker_id or task.instance ~= instance_id then
    return false
  end
  return tonumber(call('ZSCORE', EVAL_LEASES, lease_member(eval_id, evaluation, index, worker_id))) >= now
end

-- A lease leaves the indexes; the record of a worker without leases goes.
local function drop_lease(member, worker_id)
  local held = key('eval_held:' .. worker_id)
  call('ZREM', EVAL_LEASES, member)
  call('SREM', held, member)
  if call('EXISTS', held) == 0 then
    call('HDEL', EVAL_WORKERS, worker_id)
  end
  changed = true
end

local function queue_eval_task(eval_id, evaluation, index, not_before)
  call('ZADD', eval_key('pending', evaluation.number), format('%d', not_before), format('%05d', index))
  call('ZADD', EVAL_OPEN, format('%d', evaluation.number), eval_id)
  topics.evaluations = true
end

-- Takes tasks out of what is pending.
local function unqueue_eval_tasks(eval_id, evaluation, members)
  local pending = eval_key('pending', evaluation.number)
  call_many('ZREM', pending, members)
  if call('EXISTS', pending) == 0 then
    call('ZREM', EVAL_OPEN, eval_id)
  end
end

-- What is stored for the evaluation changes by so many bytes.
local function store_bytes(evaluation, bytes)
  evaluation.bytes = evaluation.bytes + bytes
  call('HINCRBY', RUN, 'eval_bytes', format('%d', bytes))
end

-- Ends the present lease of a task, or takes it out of what is pending.
local function unindex_eval_task(eval_id, evaluation, index, task)
  if task.state == 'leased' then
    drop_lease(lease_member(eval_id, evaluation, index, task.worker), task.worker)
  else
    unqueue_eval_tasks(eval_id, evaluation, {format('%05d', index)})
  end
  task.worker, task.instance = '', ''
end

-- A task has ended: `to` is 'finished' or 'failed', `bytes` the size of what is kept of it.
local function end_eval_task(eval_id, evaluation, index, task, to, bytes)
  unindex_eval_task(eval_id, evaluation, index, task)
  task.state = to
  evaluation[to] = evaluation[to] + 1
  store_bytes(evaluation, bytes - task.spec_bytes)
  call('HDEL', eval_key('specs', evaluation.number), format('%d', index))
  call('RPUSH', eval_key('ended', evaluation.number), format('%d', index))
  topics.results = true
end

-- A leased task is pending again.
local function reopen_eval_task(eval_id, evaluation, index, task, not_before)
  unindex_eval_task(eval_id, evaluation, index, task)
  task.state = 'pending'
  queue_eval_task(eval_id, evaluation, index, not_before)
end

-- A lease ended in an error: back-off, or the end of the task. Returns true when the task has failed.
local function fail_eval_attempt(eval_id, evaluation, index, task, why)
  task.failures = task.failures + 1
  task.error = string.sub(why, 1, 2000)
  local is_over = task.failures >= MAX_EVAL_ATTEMPTS
  if is_over then
    end_eval_task(eval_id, evaluation, index, task, 'failed', 0)
    if #evaluation.failures < EVAL_FAILURES_SHOWN then
      evaluation.failures[#evaluation.failures + 1] = index
    end
  else
    local backoff = policy.retry_backoff_ms * 2 ^ math.min(task.failures - 1, 6)
    reopen_eval_task(eval_id, evaluation, index, task, now + backoff)
  end
  save_eval_task(evaluation, index, task)
  save_evaluation(eval_id, evaluation)
  return is_over
end

-- Calls each(eval_id, evaluation, index, task) for the leases of these members, and drops those of deleted evaluations.
local function for_leases(members, each)
  for _, member in ipairs(members) do
    local number, eval_id, index, worker_id = string.match(member, '^(%d+)/([^/]+)/(%d+)/(.+)$')
    local evaluation, task = find_leased(eval_id, tonumber(number), tonumber(index))
    if evaluation then
      each(eval_id, evaluation, tonumber(index), task)
    else
      drop_lease(member, worker_id)
    end
  end
end

-- Ends leases that are past their expiry, at most `limit`; returns how many.
local function expire_evaluations(limit)
  local due = call('ZRANGEBYSCORE', EVAL_LEASES, '-inf', format('(%d', now), 'LIMIT', 0, limit)
  for_leases(due, function(eval_id, evaluation, index, task)
    fail_eval_attempt(eval_id, evaluation, index, task, 'lease expired')
  end)
  return #due
end

-- As it is seen: {eval_id, epoch, version, tasks, pending, finished, failed, bytes, created_ms, failures}; a failure is
-- {index, task_id, attempts, error}, and there are none unless `with_failures`.
local function view_evaluation(eval_id, evaluation, with_failures)
  local failures = {}
  if with_failures then
    for at, index in ipairs(evaluation.failures) do
      local task = load_eval_task(evaluation, index)
      failures[at] = {index, task.task_id, task.attempt, task.error}
    end
  end
  return {
    eval_id, evaluation.epoch, evaluation.version, evaluation.tasks,
    call('ZCARD', eval_key('pending', evaluation.number)), evaluation.finished, evaluation.failed, evaluation.bytes,
    evaluation.created_ms, failures,
  }
end
