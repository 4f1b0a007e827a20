-- Accepts groups whose payloads are already stored and staged.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, groups, retry (1 or 0), again (1 or 0)}; retry: the groups are staged already; again: a later
--         call of the same push, for those that it answered with 'more'. A group is {task_id, generation, lease_id (''
--         for none), payload key, head_epoch, head, tail_epoch, tail, samples, tokens, loss_tokens, bytes, spans (1 or
--         0), environment, mean_milli, equal_rewards (1 or 0), mean_reward_milli, min_response_tokens,
--         max_response_tokens, response_lengths, rewards, response_tokens, reward_milli (sum over samples), turns,
--         truncated_samples, {bucket, samples in it, ...} by response length, {epoch, version, response tokens, ...}
--         for each version below the tail (empty: all are of the mean version), first_revision (the run's, that the
--         pusher knew before its first try; 0: the present one)}
-- Replies {'pushed', revision, epoch, version, outcomes}; an outcome is the string 'queued' | 'filtered' |
--         'duplicate' | 'closed' | 'rejected_full' | 'blocked' | 'unknown_lease' | 'gone' (its payload, which was
--         staged, is not any more) | 'more' (much was dropped; call again for it), or for what can never be accepted
--         {field, value, limit}
--       | {'error', 'unknown_run' | 'store_rolled_back' | 'run_paused', ...}: the payloads are on trash where there
--         is a run
-- Complexity O(classes + (groups + 128 dropped) * log queued)

-- @include groups
-- @include gathering
-- @include environments
-- @include remembered
-- @include staging
-- @include totals
-- @include waiting

local request = unpack_msg(ARGV[1])
local groups, retry, again = request[2], request[3] == 1, request[4] == 1
-- Groups that this call may still drop: few enough that it holds the store up for milliseconds only.
local drops_left = 128

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
  -- Versions do not fall within a sample, so the tail is the newest of all. Those of earlier epochs are clamped.
  local epoch, version = group[7], group[8]
  if epoch > state.epoch then
    return {'samples.spans.version.epoch', format('%d', epoch), format('at most %d, the epoch of the run', state.epoch)}
  elseif epoch == state.epoch and version > state.version
    and version > tonumber(call('HGET', RUN, 'plan_version') or 0) then
    return {'samples.spans.version', format('%d', version),
      format('at most %d, the version that is published, or one that a plan announces', state.version)}
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
local filter_set = policy.filter_equal_rewards ~= 0
  or policy.filter_min_response_tokens > 0 or policy.filter_max_response_tokens > 0
  or policy.filter_min_mean_reward_milli > -NO_REWARD_BOUND or policy.filter_max_mean_reward_milli < NO_REWARD_BOUND

-- The statistic under which the run's filter ends a group, nil when the group passes.
local function filtered_by(group)
  if not filter_set then
    return nil
  end
  local equal_rewards, mean_reward, shortest, longest = unpack(group, 16, 19)
  local most = policy.filter_max_response_tokens
  if policy.filter_equal_rewards ~= 0 and equal_rewards == 1 then
    return 'filtered_equal_rewards'
  elseif shortest < policy.filter_min_response_tokens or most > 0 and longest > most then
    return 'filtered_response_tokens'
  elseif mean_reward < policy.filter_min_mean_reward_milli or mean_reward > policy.filter_max_mean_reward_milli then
    return 'filtered_mean_reward'
  end
  return nil
end

-- The group waits: in the line, or by its staging alone for a resume that goes on.
local function block(group, task, attempt, is_in_line)
  if is_in_line then
    wait_in_line(group[4])
  end
  call('ZADD', key('staging'), format('%d', now), group[4])
  if attempt > 0 and live_expiry(group[1], task, task.generation, attempt) then
    call('ZADD', LEASES, format('%d', now + policy.lease_ttl_ms), entry(group[1], task))
    changed = true
  end
  return 'blocked'
end

-- Makes room by the overflow action; an outcome when there is none.
local function make_room(group, task, attempt)
  local action, tokens, bytes = policy.overflow_action, group[10], group[12]
  if action == 'block' then
    if is_behind_others(group[4]) or not fits(1, tokens, bytes) then
      return block(group, task, attempt, true)
    end
  elseif state.resuming then
    -- What it takes back from steps has its place first.
    return not fits(1, tokens, bytes) and block(group, task, attempt, false) or nil
  elseif action == 'reject' then
    return not fits(1, tokens, bytes) and 'rejected_full' or nil
  elseif action ~= 'drop_oldest' then
    error('unknown overflow_action ' .. action)
  end
  while not fits(1, tokens, bytes) do
    if drops_left == 0 then
      return 'more'
    elseif not drop_oldest() then
      if not state.gathered then
        return 'rejected_full'
      end
      give_back_gathered()
    end
    drops_left = drops_left - 1
  end
  return nil
end

-- A moving mean over the last groups, about 64 of them: which part of them passes the filter.
local function follow_acceptance(passed)
  if filter_set then
    local statistics = ledger.statistics
    statistics.recent_acceptance_ppm = floor((statistics.recent_acceptance_ppm * 63 + (passed and 1000000 or 0)) / 64)
  end
end

-- What this call accepts, in the order of ACCEPTED; response tokens by environment; samples by bucket of lengths.
local ACCEPTED = {'accepted_groups', 'accepted_samples', 'accepted_response_tokens', 'accepted_longest_tokens',
  'accepted_reward_milli', 'accepted_turns', 'accepted_truncated_samples', 'generated_groups', 'generation_ms'}
local accepted, response_tokens, by_length = {0, 0, 0, 0, 0, 0, 0, 0, 0}, {}, {}

-- Counts a group that is being accepted; a lease counts when it is the task's last one, whose beginning is known.
local function count_accepted(group, task, attempt)
  local environment, tokens, buckets = group[14], group[22], group[26]
  accepted[1], accepted[2], accepted[3] = accepted[1] + 1, accepted[2] + group[9], accepted[3] + tokens
  accepted[4], accepted[5], accepted[6] = accepted[4] + group[19], accepted[5] + group[23], accepted[6] + group[24]
  accepted[7] = accepted[7] + group[25]
  if attempt > 0 and attempt == task.attempt then
    accepted[8], accepted[9] = accepted[8] + 1, accepted[9] + now - task.granted
  end
  response_tokens[environment] = (response_tokens[environment] or 0) + tokens
  for index = 1, #buckets, 2 do
    by_length[buckets[index]] = (by_length[buckets[index]] or 0) + buckets[index + 1]
  end
end

-- Before the environments are written, which `response_tokens` adds to.
table.insert(before_close, 1, function()
  for place, name in ipairs(ACCEPTED) do
    count_total(name, accepted[place])
  end
  for environment, tokens in pairs(response_tokens) do
    local its = environment_totals(environment)
    add_total(its, 1, tokens)
  end
  for bucket, samples in pairs(by_length) do
    call('HINCRBY', key('response_lengths'), format('%d', bucket), format('%d', samples))
  end
end)

-- What assembly needs of a group: see lib/record.lua.
local function pack_responses(group)
  local packed, versions = struct.pack(RESPONSES, group[22], group[19], group[23], group[24], group[25]), group[27]
  for index = 1, #versions, 3 do
    local version = effective(versions[index], versions[index + 1])
    packed = packed .. struct.pack(VERSION_TOKENS, version, versions[index + 2])
  end
  return packed
end

-- Accepts a group; `filter` is the statistic under which it ends at once, nil when it is queued.
local function accept(group, task, attempt, filter)
  state.sequence = state.sequence + 1
  state.leaseless = state.leaseless or attempt == 0 or nil
  local task_id, environment = group[1], group[14]
  count_accepted(group, task, attempt)
  if task.state ~= 'new' then
    unindex_task(task_id, task)
  end
  move_task(task, 'completed')
  drop_continuation(task)
  task.accepted, task.body, task.worker, task.instance = attempt, group[4], '', ''
  task.filtered, task.group = filter and true or nil, state.sequence
  save_task(task_id, task)
  local made = {
    format('%s/%d', task_id, group[2]), task_id, state.sequence, group[4],
    effective(group[5], group[6]), effective(group[7], group[8]), state.epoch,
    group[9], group[10], group[11], group[12], group[13], environment, task.priority,
    effective_milli(group[7], group[15]),
    pack_responses(group),
  }
  know_environment(environment)
  follow_acceptance(not filter)
  if filter then
    stat(filter, 1)
    move_group(made, 'new', 'filtered')
    bury_task(task_id)
    topics.tasks = true
  else
    queue_group(made, 'new')
  end
  if is_recorded() then
    record('accepted', {
      now, made[G_ID], state.sequence, environment, group[20], group[21], group[10], group[12],
      made[G_HEAD], made[G_TAIL], made[G_MEAN], filter and 'filtered' or 'queued', group[4],
    })
  end
  return filter and 'filtered' or 'queued'
end

local function push(group)
  local invalid, attempt = check_group(group)
  if invalid then
    return invalid
  end
  local task = load_task(group[1])
  if task and task.body == group[4] then
    -- This very payload was accepted by a call whose reply got lost.
    return task.filtered and 'filtered' or 'queued', true
  elseif is_gone(group[4]) then
    return 'gone'
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
    local refused = recall(group[1], group[28])
    if refused then
      return refused
    end
    task = new_task(0, 0, group[14])
    task.leaseless = true
  end
  if not environment_fits(group[14]) then
    return {'environment', group[14], format("one of the run's %d environments", MAX_ENVIRONMENTS)}
  end
  local filter = filtered_by(group)
  return not filter and make_room(group, task, attempt) or accept(group, task, attempt, filter)
end

local outcomes, settled, outcome, is_repeat = {}, {}, nil, nil
for index, group in ipairs(groups) do
  local payload = group[4]
  -- The order of the groups is kept: those behind one that has to come again come with it.
  if outcome ~= 'more' then
    outcome, is_repeat = push(group)
  end
  outcomes[index] = outcome
  if outcome ~= 'blocked' and outcome ~= 'more' then
    settled[#settled + 1] = payload
    if counters[outcome] then
      stat(counters[outcome], 1)
    end
    if outcome ~= 'queued' and not is_repeat then
      trash(payload)
    end
    if retry then
      leave_line(payload)
    end
  end
end
if somebody_left() and somebody_waits() then
  topics.space = true
end
unstage(settled)
-- Calls of this push that were answered with 'more' have changed something, and left the revision to the last one.
changed = changed or again
return reply('pushed', close_run(outcome == 'more'), state.epoch, state.version, outcomes)
