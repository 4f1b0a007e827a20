-- Task records and the indexes over them.
--
-- Record (hash `tasks`, msgpack map): sequence, priority, environment, state, generation, attempt, failures, returned
-- (it came back: ahead of fresh ones), leaseless (made by a push, cannot be started anew), worker and instance (of the
-- lease), lease_epoch and lease_head (the oldest weights that the lease's tokens come from, as of that epoch), granted
-- (ms, when the last lease was given), error (the last), accepted (attempt whose group was accepted, 0 without a
-- lease, -1 none), body (its payload key), group (its sequence, absent before) and filtered (true when the filter ended
-- it, else absent), and of its continuation: payload (key, '' for none), head_epoch, head (-1: none), tokens. The spec
-- is in hash `specs`.
--
-- Indexes: lib/pending.lua holds the pending ones, `leases` (score: expiry) the leased ones, set `held:<worker>` a
-- worker's leased ones, `ended` (score: order of ending) the tombstones that are in no assembled step. Members of all
-- but `ended` are entry(task): fixed-width sequence, then the task id, so that ties go by sequence.

-- @include ledger
-- @include pending

local TASKS, LEASES, TRASH = key('tasks'), key('leases'), key('trash')

local function new_task(sequence, priority, environment)
  return {
    sequence = sequence, priority = priority, environment = environment, state = 'new', generation = 0, attempt = 0,
    failures = 0, returned = false, leaseless = false, worker = '', instance = '', lease_epoch = 0, lease_head = 0,
    granted = 0, error = '', accepted = -1, body = '', payload = '', head_epoch = 0, head = -1, tokens = 0,
  }
end

local function load_task(task_id)
  local raw = call('HGET', TASKS, task_id)
  return raw and unpack_msg(raw) or nil
end

local function save_task(task_id, task)
  call('HSET', TASKS, task_id, pack(task))
end

local function entry(task_id, task)
  return format('%015d', task.sequence) .. task_id
end

local function entry_task_id(member)
  return string.sub(member, 16)
end

local function trash(payload)
  if payload ~= '' then
    call('SADD', TRASH, payload)
  end
end

local function drop_continuation(task)
  trash(task.payload)
  task.payload, task.head_epoch, task.head, task.tokens = '', 0, -1, 0
end

-- Gives up a continuation that is no use any more.
local function discard_continuation(task)
  stat('continuation_tokens_discarded', task.tokens)
  drop_continuation(task)
end

-- Splits "task_id/generation/attempt"; nil when malformed.
local function parse_lease_id(id)
  local task_id, generation, attempt = string.match(id, '^([^/]+)/(%d+)/([1-9]%d*)$')
  if not task_id or #generation > 15 or #attempt > 15 or string.match(generation, '^0%d') then
    return nil
  end
  return task_id, tonumber(generation), tonumber(attempt)
end

-- Order of leasing: priority descending, then tasks that came back, then (the member) sequence.
local function queue_task(task_id, task, not_before)
  if not_before <= now then
    add_pending(task.environment, -2 * task.priority - (task.returned and 1 or 0), entry(task_id, task))
  else
    call('ZADD', DELAYED, format('%d', not_before), entry(task_id, task))
  end
  topics.tasks = true
end

-- Tasks whose back-off is over join the order of leasing, at most `limit` of them.
local function promote_due(limit)
  for _, member in ipairs(call('ZRANGEBYSCORE', DELAYED, '-inf', format('%d', now), 'LIMIT', 0, limit)) do
    local task_id = entry_task_id(member)
    call('ZREM', DELAYED, member)
    queue_task(task_id, load_task(task_id), now)
  end
end

-- Takes an open task out of the indexes of its state.
local function unindex_task(task_id, task)
  local member = entry(task_id, task)
  if task.state == 'leased' then
    call('ZREM', LEASES, member)
    call('SREM', key('held:' .. task.worker), member)
    topics.tasks = true
  else
    remove_pending(task.environment, member)
  end
end

-- The task has ended outside of any step: its tombstone goes at the next checkpoint.
local function bury_task(task_id)
  state.ended_sequence = state.ended_sequence + 1
  call('ZADD', key('ended'), format('%d', state.ended_sequence), task_id)
  call('HDEL', key('specs'), task_id)
end

-- An open or completed task becomes pending again, by its own rules on attempt and failures.
local function reopen_task(task_id, task, not_before)
  if task.state ~= 'completed' then
    unindex_task(task_id, task)
  end
  move_task(task, 'pending')
  task.returned, task.worker, task.instance = true, '', ''
  queue_task(task_id, task, not_before)
  save_task(task_id, task)
end

-- Starts a completed task anew, as the next generation.
local function regenerate_task(task_id, task)
  task.generation = task.generation + 1
  task.attempt, task.failures, task.accepted, task.body, task.error = 0, 0, -1, '', ''
  reopen_task(task_id, task, now)
end

-- A lease ended in an error: back-off, or the end of the task. Returns true when the task has failed.
local function fail_attempt(task_id, task, why)
  task.failures = task.failures + 1
  task.error = string.sub(why, 1, 2000)
  if task.failures < policy.max_attempts then
    reopen_task(task_id, task, now + policy.retry_backoff_ms * 2 ^ math.min(task.failures - 1, 6))
    return false
  end
  unindex_task(task_id, task)
  move_task(task, 'failed')
  drop_continuation(task)
  task.worker, task.instance = '', ''
  save_task(task_id, task)
  bury_task(task_id)
  call('LPUSH', key('failures'), pack({task_id, task.attempt, task.error, now}))
  call('LTRIM', key('failures'), 0, 99)
  state.last_error = task.error
  recompute_pause()
  return true
end

-- Ends leases that are past their expiry, at most `limit`; returns how many.
local function expire_leases(limit)
  local due = call('ZRANGEBYSCORE', LEASES, '-inf', format('(%d', now), 'LIMIT', 0, limit)
  for _, member in ipairs(due) do
    local task_id = entry_task_id(member)
    stat('leases_expired', 1)
    fail_attempt(task_id, load_task(task_id), 'lease expired')
  end
  return #due
end

-- Expiry of a lease in ms if this attempt of the task is leased and not past it, else nil.
local function live_expiry(task_id, task, generation, attempt)
  if task.state ~= 'leased' or task.generation ~= generation or task.attempt ~= attempt then
    return nil
  end
  local expiry = tonumber(call('ZSCORE', LEASES, entry(task_id, task)))
  return expiry >= now and expiry or nil
end
