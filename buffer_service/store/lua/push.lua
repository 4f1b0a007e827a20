-- Accepts groups whose payloads are already stored and staged.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, groups, retry (1 or 0)}; retry: the groups were blocked before. A group is {task_id,
--         generation, lease_id ('' for none), payload key, head_epoch, head, tail_epoch, tail, samples, tokens,
--         loss_tokens, bytes, spans (1 or 0), environment}
-- Replies {'pushed', revision, epoch, version, outcomes}; an outcome is the string 'queued' | 'duplicate' | 'closed' |
--         'rejected_full' | 'blocked' | 'unknown_lease', or for what can never be accepted {field, value, limit}
--       | {'error', 'unknown_run' | 'store_rolled_back' | 'run_paused', ...}: the payloads are on trash where there
--         is a run
-- Complexity O(groups * log queued), plus the same for each group dropped

-- @include groups
-- @include staging

local request = unpack_msg(ARGV[1])
local groups, retry = request[2], request[3] == 1

local refusal = open_run(request[1])
if not refusal then
  refusal = check_rolled_back()
end
if refusal then
  if state then
    local payloads = {}
    for index, group in ipairs(groups) do
      payloads[index] = group[4]
    end
    discard_staged(payloads)
  end
  return refusal
end

-- What becomes of an attempt whose task exists: 'accept', or an outcome.
local function judge(task, generation, attempt)
  if attempt == 0 then
    if generation ~= task.generation then
      return 'closed'
    end
  elseif generation > task.generation or (generation == task.generation and attempt > task.attempt) then
    return 'unknown_lease'
  elseif generation < task.generation then
    return 'closed'
  end
  if task.state == 'pending' or task.state == 'leased' then
    return 'accept'
  end
  -- A failed task has accepted no attempt.
  return task.accepted == attempt and 'duplicate' or 'closed'
end

-- True for a retry of a blocked push whose payload the sweep has given up in the meantime.
local function is_gone(payload)
  return retry and not call('ZSCORE', key('staging'), payload)
end

-- What makes a group unacceptable whatever the state of the queue: {field, value, limit}, or nil. And its attempt.
local function check_group(group)
  local task_id, generation, id, tokens, bytes = group[1], group[2], group[3], group[10], group[12]
  local attempt = 0
  if id ~= '' then
    local leased_task, leased_generation, leased_attempt = parse_lease_id(id)
    if leased_task ~= task_id or leased_generation ~= generation then
      return {'lease_id', id, 'task_id/generation/attempt of this group'}
    end
    attempt = leased_attempt
  end
  if bytes > policy.max_queued_bytes then
    return {'payload', format('%d', bytes), format('at most %d bytes', policy.max_queued_bytes)}
  end
  if policy.max_queued_tokens > 0 and tokens > policy.max_queued_tokens then
    return {'tokens', format('%d', tokens), format('at most %d', policy.max_queued_tokens)}
  end
  return nil, attempt
end

local counters = {duplicate = 'pushes_duplicate', closed = 'pushes_closed', rejected_full = 'pushes_rejected'}
local blocking = false

-- Makes room by the overflow action; an outcome when there is none.
local function make_room(task_id, task, attempt, tokens, bytes)
  if not blocking and fits(1, tokens, bytes) then
    return nil
  end
  if policy.overflow_action == 'drop_oldest' then
    drop_oldest_until_fits(1, tokens, bytes)
    return nil
  end
  if policy.overflow_action == 'reject' then
    return 'rejected_full'
  end
  blocking = true
  if attempt > 0 and live_expiry(task_id, task, task.generation, attempt) then
    call('ZADD', LEASES, format('%d', now + policy.lease_ttl_ms), entry(task_id, task))
    changed = true
  end
  return 'blocked'
end

local function accept(group, task, attempt)
  state.sequence = state.sequence + 1
  local task_id = group[1]
  if task.state ~= 'new' then
    unindex_task(task_id, task)
  end
  move_task(task, 'completed')
  drop_continuation(task)
  task.accepted, task.body, task.worker, task.instance = attempt, group[4], '', ''
  save_task(task_id, task)
  queue_group({
    format('%s/%d', task_id, group[2]), task_id, state.sequence, group[4],
    effective(group[5], group[6]), effective(group[7], group[8]), state.epoch,
    group[9], group[10], group[11], group[12], group[13], group[14],
  }, 'new')
end

local function push(group)
  local invalid, attempt = check_group(group)
  if invalid then
    return invalid
  end
  local task_id = group[1]
  local task = load_task(task_id)
  if task and task.body == group[4] then
    -- This very payload was accepted by a call whose reply got lost.
    return 'queued', true
  elseif is_gone(group[4]) then
    return 'closed'
  elseif task then
    local verdict = judge(task, group[2], attempt)
    if verdict ~= 'accept' then
      return verdict
    end
  elseif attempt > 0 then
    return 'unknown_lease'
  elseif group[2] ~= 0 then
    return {'generation', format('%d', group[2]), '0 for a task pushed without a lease'}
  else
    task = new_task(0, 0)
    task.leaseless = true
  end
  local full = make_room(task_id, task, attempt, group[10], group[12])
  if full then
    return full
  end
  accept(group, task, attempt)
  return 'queued'
end

local outcomes, settled = {}, {}
for index, group in ipairs(groups) do
  local outcome = push(group)
  local payload = group[4]
  outcomes[index] = outcome
  if outcome == 'blocked' then
    call('ZADD', key('staging'), format('%d', now), payload)
  else
    settled[#settled + 1] = payload
    if counters[outcome] then
      stat(counters[outcome], 1)
    end
    if outcome ~= 'queued' then
      trash(payload)
    end
  end
end
unstage(settled)
return reply('pushed', close_run(), state.epoch, state.version, outcomes)
