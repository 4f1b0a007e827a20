-- Task records and the indexes over them.
--
-- Record (hash `tasks`, msgpack map): sequence, priority, environment, state, incarnation, attempt, failures, returned
-- (it came back: ahead of fresh ones), leaseless (made by a push, cannot be started anew), worker and instance (of the
-- lease), lease_term and lease_head (the oldest weights that the lease's tokens come from, as of that term), granted
-- (ms, when the last lease was given), error (the last), accepted (attempt whose group was accepted, 0 without a
-- lease, -1 none), body (its payload key), group (its sequence, absent before) and filtered (true when the filter ended
-- it, else absent), turn (the sequence that its group is to have, Tasks.turn, else absent), and of its partial rollout:
-- payload (key, '' for none), head_term, head (-1: none), tokens. The spec is in hash `specs`.
--
-- Indexes: Pending holds the pending ones, `leases` (score: expiry) the leased ones, set `held:<worker>` a
-- worker's leased ones, `lease_heads` (score: lease_head) and `lease_turns` (score: turn) those for which batches wait,
-- `ended` (score: order of ending) the tombstones that are in no assembled step. Members of all but `ended` are
-- Tasks.entry: fixed-width sequence, then the task id, so that ties go by sequence.
--
-- A task's sink is where its result goes: the queue, or, where the record names an `evaluation`, that one's results.
-- Those are pinned to a version, their records, pending ones and ended ones are kept by Evaluations, and their leases
-- lie in `eval_leases`: what counts, counts the queue's sink alone.

-- @include evaluations
-- @include ledger
-- @include pending

local Tasks = {}

function Tasks.new(sequence, priority, environment)
  return {
    sequence = sequence, priority = priority, environment = environment, state = 'new', incarnation = 0, attempt = 0,
    failures = 0, returned = false, leaseless = false, worker = '', instance = '', lease_term = 0, lease_head = 0,
    granted = 0, error = '', accepted = -1, body = '', payload = '', head_term = 0, head = -1, tokens = 0,
  }
end

function Tasks.load(task_id)
  if Evaluations.has_task(task_id) then
    return Evaluations.load_task(task_id)
  end
  local raw = call('HGET', key('tasks'), task_id)
  return raw and unpack_msg(raw) or nil
end

function Tasks.save(task_id, task)
  if task.evaluation then
    return Evaluations.save_task(task)
  end
  call('HSET', key('tasks'), task_id, pack(task))
end

function Tasks.entry(task_id, task)
  return format('%015d', task.sequence) .. task_id
end

-- Key of the leases that go to the task's sink.
function Tasks.leases_of(task)
  return key(task.evaluation and 'eval_leases' or 'leases')
end

-- Counts something of the queue's tasks.
function Tasks.count(ctx, task, name)
  if not task.evaluation then
    Run.count(ctx, name, 1)
  end
end

-- Moves a task to another state; the ledger has those of the queue.
function Tasks.move(ctx, task, to)
  if task.evaluation then
    Ledger.check_move('task', TASK_TRANSITIONS, task.state, to)
    task.state, ctx.changed = to, true
  else
    Ledger.move_task(ctx, task, to)
  end
end

function Tasks.id_of_entry(member)
  return string.sub(member, 16)
end

-- A task's lease as a reply has it: {task_id, incarnation, attempt, spec, payload key of the partial rollout ('' for
-- none), name, pinned ({} or {term, version})}.
function Tasks.grant_of(task_id, task)
  if task.evaluation then
    return {task_id, task.incarnation, task.attempt, Evaluations.spec_of(task), '', task.name, task.pinned}
  end
  local spec = call('HGET', key('specs'), task_id) or ''
  return {task_id, task.incarnation, task.attempt, spec, task.payload, task_id, {}}
end

-- Bytes of the payloads that a lease of the task carries.
function Tasks.lease_bytes(task_id, task)
  if task.evaluation then
    return task.spec_bytes
  end
  return call('HSTRLEN', key('specs'), task_id) + (Parts.of(task.payload) or 0)
end

function Tasks.trash(payload)
  if payload ~= '' then
    call('SADD', key('trash'), payload)
  end
end

function Tasks.drop_partial_rollout(task)
  Tasks.trash(task.payload)
  task.payload, task.head_term, task.head, task.tokens = '', 0, -1, 0
end

-- Gives up a partial rollout that is no use any more.
function Tasks.discard_partial_rollout(ctx, task)
  Run.count(ctx, 'partial_rollout_tokens_discarded', task.tokens)
  Tasks.drop_partial_rollout(task)
end

-- Splits "task_id/incarnation/attempt"; nil when malformed.
function Tasks.parse_lease_id(id)
  local task_id, incarnation, attempt = string.match(id, '^([^/]+)/(%d+)/([1-9]%d*)$')
  if not task_id or #incarnation > 15 or #attempt > 15 or string.match(incarnation, '^0%d') then
    return nil
  end
  return task_id, tonumber(incarnation), tonumber(attempt)
end

-- Order of leasing: priority descending, then tasks that came back, then (the member) sequence.
function Tasks.queue(ctx, task_id, task, not_before)
  if task.evaluation then
    return Evaluations.queue_task(ctx, task, not_before)
  end
  if not_before <= ctx.now then
    Pending.add(ctx, task.environment, -2 * task.priority - (task.returned and 1 or 0), Tasks.entry(task_id, task))
  else
    call('ZADD', key('delayed'), format('%d', not_before), Tasks.entry(task_id, task))
  end
  ctx.topics.tasks = true
end

-- Adds a task.
function Tasks.add(ctx, task_id, task)
  Tasks.move(ctx, task, 'pending')
  Tasks.queue(ctx, task_id, task, ctx.now)
  Tasks.save(task_id, task)
end

-- Tasks whose back-off is over join the order of leasing, at most `limit` of them.
function Tasks.promote_due(ctx, limit)
  for _, member in ipairs(call('ZRANGEBYSCORE', key('delayed'), '-inf', format('%d', ctx.now), 'LIMIT', 0, limit)) do
    local task_id = Tasks.id_of_entry(member)
    call('ZREM', key('delayed'), member)
    Tasks.queue(ctx, task_id, Tasks.load(task_id), ctx.now)
  end
end

-- Whether batches wait for leased tasks (MicroBatches.awaited) by their heads, which then are in `lease_heads`.
function Tasks.heads_are_awaited(ctx)
  return ctx.policy.stale_action == 'wait'
end

-- The same by their turns, and `lease_turns`.
function Tasks.turns_are_awaited(ctx)
  return ctx.policy.order == 'submission' and ctx.policy.order_window_groups > 0
end

function Tasks.are_awaited(ctx)
  return Tasks.heads_are_awaited(ctx) or Tasks.turns_are_awaited(ctx)
end

-- The sequence that the task's group is to have: in the order of submission that of the task's first lease, else of the
-- group's acceptance. Turns follow each other without a gap, so that a window counts groups: they are counted by
-- state.turns, from the sequence that the run had when the order began.
function Tasks.turn(ctx, task)
  local state = ctx.state
  if ctx.policy.order ~= 'submission' then
    state.sequence = state.sequence + 1
    return state.sequence
  end
  if not task.turn then
    if not state.turns then
      Run.refuse_first_release()
    end
    state.turns = (state.turns or state.sequence) + 1
    task.turn = state.turns
  end
  return task.turn
end

-- Takes a leased task out of the indexes, together with others of this call.
function Tasks.end_lease(ctx, task_id, task)
  local member = Tasks.entry(task_id, task)
  Run.keep_back(ctx, 'ZREM', Tasks.leases_of(task), member)
  Run.keep_back(ctx, 'SREM', key('held:' .. task.worker), member)
  if not task.evaluation then
    ctx.topics.tasks = true
    if Tasks.heads_are_awaited(ctx) then
      Run.keep_back(ctx, 'ZREM', key('lease_heads'), member)
      ctx.topics.groups = true
    end
    if Tasks.turns_are_awaited(ctx) then
      Run.keep_back(ctx, 'ZREM', key('lease_turns'), member)
      ctx.topics.groups = true
    end
  end
end

-- Whether a task's record names a payload: its group's, what stages have added to that, or its partial rollout.
function Tasks.names(task, payload)
  for _, added in pairs(task.added or {}) do
    if added[2] == payload then
      return true
    end
  end
  return task.body == payload or task.payload == payload
end

-- Takes an open task out of the indexes of its state.
function Tasks.unindex(ctx, task_id, task)
  local member = Tasks.entry(task_id, task)
  if task.state == 'leased' then
    Tasks.end_lease(ctx, task_id, task)
    Run.write_kept_back(ctx)
  elseif task.evaluation then
    Evaluations.unqueue_task(task)
  else
    Pending.remove(ctx, task.environment, member)
  end
end

-- The task has ended outside of any step: its tombstone goes at the next checkpoint.
function Tasks.bury(ctx, task_id)
  local state = ctx.state
  state.ended_sequence = state.ended_sequence + 1
  call('ZADD', key('ended'), format('%d', state.ended_sequence), task_id)
  call('HDEL', key('specs'), task_id)
end

-- An open or completed task becomes pending again, by its own rules on attempt and failures.
function Tasks.reopen(ctx, task_id, task, not_before)
  if task.state ~= 'completed' then
    Tasks.unindex(ctx, task_id, task)
  end
  Tasks.move(ctx, task, 'pending')
  task.returned, task.worker, task.instance = true, '', ''
  Tasks.queue(ctx, task_id, task, not_before)
  Tasks.save(task_id, task)
end

-- Starts a completed task anew, as the next incarnation.
function Tasks.regenerate(ctx, task_id, task)
  task.incarnation = task.incarnation + 1
  task.attempt, task.failures, task.accepted, task.body, task.error, task.added = 0, 0, -1, '', '', nil
  Tasks.reopen(ctx, task_id, task, ctx.now)
end

-- An open task has completed or failed; of one of an evaluation `bytes` are kept.
function Tasks.finish(ctx, task_id, task, to, bytes)
  Tasks.unindex(ctx, task_id, task)
  Tasks.move(ctx, task, to)
  Tasks.drop_partial_rollout(task)
  task.worker, task.instance = '', ''
  Tasks.save(task_id, task)
  if task.evaluation then
    Evaluations.end_task(ctx, task, bytes)
  end
end

-- A lease ended in an error: back-off, or the end of the task. Returns true when the task has failed.
function Tasks.fail_attempt(ctx, task_id, task, why)
  local policy = ctx.policy
  task.failures = task.failures + 1
  task.error = string.sub(why, 1, 2000)
  if not task.evaluation then
    Ledger.count_work(ctx, task.environment, 2, 1)
  end
  if task.failures < (task.evaluation and MAX_EVAL_ATTEMPTS or policy.max_attempts) then
    Tasks.reopen(ctx, task_id, task, ctx.now + policy.retry_backoff_ms * 2 ^ math.min(task.failures - 1, 6))
    return false
  end
  Tasks.finish(ctx, task_id, task, 'failed', 0)
  if task.evaluation then
    return true
  end
  Ledger.count_work(ctx, task.environment, 3, 1)
  Tasks.bury(ctx, task_id)
  Run.record(ctx, 'failed', {ctx.now, format('%s/%d', task_id, task.incarnation), task.error})
  call('LPUSH', key('failures'), pack({task_id, task.attempt, task.error, ctx.now}))
  call('LTRIM', key('failures'), 0, 99)
  ctx.state.last_error = task.error
  Run.recompute_pause(ctx)
  return true
end

-- Ends leases of one sink, `leases` or `eval_leases`, that are past their expiry, at most `limit`; returns how many.
function Tasks.expire_leases(ctx, name, limit)
  local leases = key(name)
  local due = call('ZRANGEBYSCORE', leases, '-inf', format('(%d', ctx.now), 'LIMIT', 0, limit)
  for _, member in ipairs(due) do
    local task_id = Tasks.id_of_entry(member)
    local task = Tasks.load(task_id)
    if task then
      Tasks.count(ctx, task, 'leases_expired')
      Tasks.fail_attempt(ctx, task_id, task, 'lease expired')
    else
      -- Of an evaluation that is being deleted (Burial).
      call('ZREM', leases, member)
    end
  end
  return #due
end

-- Expiry of a lease in ms if this attempt of the task is leased and not past it, else nil.
function Tasks.live_expiry(ctx, task_id, task, incarnation, attempt)
  if task.state ~= 'leased' or task.incarnation ~= incarnation or task.attempt ~= attempt then
    return nil
  end
  local expiry = tonumber(call('ZSCORE', Tasks.leases_of(task), Tasks.entry(task_id, task)))
  return expiry >= ctx.now and expiry or nil
end
