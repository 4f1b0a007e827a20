-- Evaluations: tasks that are generated at one weight version, beside the training. Nothing here touches the ledgers.
--
-- Their tasks are those of Tasks, with leases like any other's. Here is what becomes of them where the queue's have
-- ledgers, Pending and a tombstone. The id of such a task is "eval_id@number.index"; the number tells a deleted
-- evaluation from a later one of the same id, and no task of the queue has an @ in its id.
--
-- Keys: hash `evals` (by id: record), hash `eval_manifests` (by number: how to load the version), zset `eval_open`
-- (score: number; ids of those with pending tasks), zset `eval_leases` (Tasks), set `eval_deleting` (numbers, Burial);
-- RUN field eval_bytes (stored for all of them). Of each evaluation: hash `eval_tasks:<n>` (by index: task), hash
-- `eval_specs:<n>` (of those without a result), zset `eval_pending:<n>` (score: not_before, 0 for at once; member:
-- index, fixed width), list `eval_ended:<n>` (indexes).
--
-- Record: number, term, version, digest, created_ms, tasks, finished, failed, bytes, failures (indexes of the first
-- failed ones). A task has, beside what Tasks says: evaluation (id), number, index, name (the task's own id), pinned
-- ({term, version}), group_size, spec_bytes; its body is the key of its result.

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

function Evaluations.has_task(task_id)
  return string.find(task_id, '@', 1, true) ~= nil
end

function Evaluations.task_id_of(eval_id, number, index)
  return format('%s@%d.%d', eval_id, number, index)
end

-- Evaluation, number and index of a task's id; nil when malformed.
function Evaluations.parse_task_id(task_id)
  local eval_id, number, index = string.match(task_id, '^([^@]+)@(%d+)%.(%d+)$')
  if not eval_id or #number > 15 or #index > 4 then
    return nil
  end
  number, index = tonumber(number), tonumber(index)
  if Evaluations.task_id_of(eval_id, number, index) ~= task_id then
    return nil
  end
  return eval_id, number, index
end

-- Whether there is such an evaluation (still).
function Evaluations.exists(eval_id, number)
  local evaluation = Evaluations.load(eval_id)
  return evaluation ~= nil and evaluation.number == number
end

-- The task; nil where there is none, or its evaluation was deleted.
function Evaluations.load_task(task_id)
  local eval_id, number, index = Evaluations.parse_task_id(task_id)
  if not eval_id or not Evaluations.exists(eval_id, number) then
    return nil
  end
  local raw = call('HGET', Evaluations.key_of('tasks', number), format('%d', index))
  return raw and unpack_msg(raw) or nil
end

function Evaluations.save_task(task)
  call('HSET', Evaluations.key_of('tasks', task.number), format('%d', task.index), pack(task))
end

function Evaluations.spec_of(task)
  return call('HGET', Evaluations.key_of('specs', task.number), format('%d', task.index)) or ''
end

function Evaluations.queue_task(ctx, task, not_before)
  if not_before <= ctx.now then
    not_before = 0
  end
  call('ZADD', Evaluations.key_of('pending', task.number), format('%d', not_before), format('%05d', task.index))
  call('ZADD', key('eval_open'), format('%d', task.number), task.evaluation)
  ctx.topics.evaluations = true
end

-- Takes a task out of what is pending.
function Evaluations.unqueue_task(task)
  local pending = Evaluations.key_of('pending', task.number)
  call('ZREM', pending, format('%05d', task.index))
  if call('EXISTS', pending) == 0 then
    call('ZREM', key('eval_open'), task.evaluation)
  end
end

-- What pends for a version: ids of up to `count` tasks that are due, those of the oldest evaluation first; whether more
-- of them back off; the oldest evaluation with pending tasks, and the oldest of another version (nil: none).
function Evaluations.pick(ctx, term, version, count)
  local picked, is_backing_off, oldest, other = {}, false, nil, nil
  for _, eval_id in ipairs(call('ZRANGE', key('eval_open'), 0, -1)) do
    local evaluation = Evaluations.load(eval_id)
    oldest = oldest or evaluation
    if evaluation.term ~= term or evaluation.version ~= version then
      other = other or evaluation
    elseif #picked < count then
      local pending, left = Evaluations.key_of('pending', evaluation.number), count - #picked
      local due = call('ZRANGEBYSCORE', pending, '-inf', format('%d', ctx.now), 'LIMIT', 0, left)
      for _, member in ipairs(due) do
        picked[#picked + 1] = Evaluations.task_id_of(eval_id, evaluation.number, tonumber(member))
      end
      is_backing_off = is_backing_off or (#due < left and call('ZCARD', pending) > #due)
    end
  end
  return picked, is_backing_off, oldest, other
end

-- An evaluation's weights as a reply names them: {term, version, manifest ('' for none)}.
function Evaluations.weights_of(evaluation)
  local manifest = call('HGET', key('eval_manifests'), format('%d', evaluation.number)) or ''
  return {evaluation.term, evaluation.version, manifest}
end

-- What is stored for the evaluation changes by so many bytes.
function Evaluations.store_bytes(evaluation, bytes)
  evaluation.bytes = evaluation.bytes + bytes
  call('HINCRBY', RUN, 'eval_bytes', format('%d', bytes))
end

-- Bytes stored for all evaluations once `more` have come.
function Evaluations.stored_with(more)
  return tonumber(call('HGET', RUN, 'eval_bytes') or 0) + more
end

-- A task has completed or failed; `bytes` is the size of what is kept of it.
function Evaluations.end_task(ctx, task, bytes)
  local evaluation, index = Evaluations.load(task.evaluation), format('%d', task.index)
  if task.state == 'completed' then
    evaluation.finished = evaluation.finished + 1
  else
    evaluation.failed = evaluation.failed + 1
    if #evaluation.failures < EVAL_FAILURES_SHOWN then
      evaluation.failures[#evaluation.failures + 1] = task.index
    end
  end
  Evaluations.store_bytes(evaluation, bytes - task.spec_bytes)
  Evaluations.save(ctx, task.evaluation, evaluation)
  call('HDEL', Evaluations.key_of('specs', task.number), index)
  call('RPUSH', Evaluations.key_of('ended', task.number), index)
  ctx.topics.results = true
end

-- The task of an evaluation that is there.
function Evaluations.task_at(evaluation, index)
  return unpack_msg(call('HGET', Evaluations.key_of('tasks', evaluation.number), format('%d', index)))
end

-- As it is seen: {eval_id, term, version, tasks, pending, finished, failed, bytes, created_ms, failures}; a failure is
-- {index, task_id, attempts, error}, and there are none unless `with_failures`.
function Evaluations.view(eval_id, evaluation, with_failures)
  local failures = {}
  if with_failures then
    for at, index in ipairs(evaluation.failures) do
      local task = Evaluations.task_at(evaluation, index)
      failures[at] = {index, task.name, task.attempt, task.error}
    end
  end
  return {
    eval_id, evaluation.term, evaluation.version, evaluation.tasks,
    call('ZCARD', Evaluations.key_of('pending', evaluation.number)), evaluation.finished, evaluation.failed,
    evaluation.bytes, evaluation.created_ms, failures,
  }
end
