-- Accepts groups whose payloads are already stored: staged in the same transaction, or written by their pushers.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, groups, retry (1 or 0), again (1 or 0)}; retry: the groups are staged already; again: a later
--         call of the same push, for those that it answered with 'more'. A group has
--         the fields of rules/groups.py, PUSHED. Among them: lease_id: '' for none; spans, equal_rewards: 1 or 0;
--         stored: 1 where its pusher has written the payload, under a key that a repeated push has too; reward_milli:
--         the sum over samples; length_buckets: {bucket, samples in it, ...} by response length; version_tokens: {term,
--         version, response tokens, ...} for each version below the tail (empty: all are of the mean version);
--         first_revision: the run's, that the pusher knew before its first try (0: the present one)
-- ARGV[2] where payloads lie apart, and some were written by their pushers: a digit for each group, 1 when the payload
--         is there
-- Replies {'pushed', revision, term, version, outcomes}; an outcome is the string 'queued' | 'filtered' |
--         'recorded' | 'added' | 'duplicate' | 'closed' | 'rejected_full' | 'blocked' | 'unknown_lease' | 'gone' (its
--         payload, which was staged, is not any more) | 'payload_missing' (what its pusher wrote is not there) | 'more'
--         (much was dropped; call again for it), or for what can never be accepted {field, value, limit}
--       | {'error', 'unknown_run' | 'store_rolled_back' | 'run_paused', ...}: the payloads are deleted where there
--         is a run, but for those that their pushers wrote and push again
-- Complexity O(subqueues + (groups + 128 dropped) * log queued)

-- @include accepted
-- @include filters
-- @include groups
-- @include gathering
-- @include environments
-- @include remembered
-- @include results
-- @include stages
-- @include staging
-- @include waiting

local ctx = Run.context()
local seen, groups, retry, again = unpack(unpack_msg(ARGV[1]), 1, 4)
-- Groups that this call may still drop: few enough that it holds the store up for milliseconds only.
ctx.drops_left = 128

local refusal = Run.open(ctx, seen)
if not refusal then
  refusal = Run.check_rolled_back(ctx)
end
if refusal then
  if ctx.state then
    local payloads = {}
    for _, group in ipairs(groups) do
      -- Whoever has written a payload comes again with it.
      if retry == 1 or group[P_STORED] == 0 then
        payloads[#payloads + 1] = group[P_PAYLOAD]
      end
    end
    Staging.discard(payloads)
  end
  return refusal
end
local state, policy = ctx.state, ctx.policy

-- What becomes of an attempt whose task exists: 'accept', or an outcome.
local function judge(task, incarnation, attempt)
  if attempt == 0 then
    if incarnation ~= task.incarnation then
      return 'closed'
    end
  elseif incarnation > task.incarnation or (incarnation == task.incarnation and attempt > task.attempt) then
    return 'unknown_lease'
  elseif incarnation < task.incarnation then
    return 'closed'
  end
  if task.state == 'pending' or task.state == 'leased' then
    return 'accept'
  end
  -- A failed task has accepted no attempt.
  return task.accepted == attempt and 'duplicate' or 'closed'
end

-- What is answered where the payload is not there: the sweep has given up what was blocked, or the store does not have
-- what the pusher wrote. Nil where it is.
local function missing(group)
  local is_stored = group[P_STORED]
  -- In one transaction with this script it was staged; apart, it may have been given up since.
  if PAYLOADS_APART == 0 and is_stored == 0 and retry == 0 or Staging.has(group) then
    return nil
  end
  return is_stored == 1 and 'payload_missing' or 'gone'
end

-- What makes a group unacceptable whatever the state of the queue: {field, value, limit}, or nil. And its attempt.
local function check_group(group)
  local task_id, incarnation, id = group[P_TASK_ID], group[P_INCARNATION], group[P_LEASE_ID]
  local tokens, bytes = group[P_TOKENS], group[P_SIZE_BYTES]
  local attempt = 0
  if id ~= '' then
    local leased_task, leased_incarnation, leased_attempt = Tasks.parse_lease_id(id)
    if leased_task ~= task_id or leased_incarnation ~= incarnation then
      return {'lease_id', id, 'task_id/incarnation/attempt of this group'}
    end
    attempt = leased_attempt
  end
  -- Versions do not fall within a sample, so the tail is the newest of all. Those of earlier terms are clamped.
  local term, version = group[P_TAIL_TERM], group[P_TAIL]
  if term > state.term then
    return {'samples.spans.version.term', format('%d', term), format('at most %d, the term of the run', state.term)}
  elseif term == state.term and version > state.version
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

-- ctx.tasks: tasks of the groups for the queue, as they are stored or as this call has left them.
ctx.tasks = {}
do
  local ids, leaseless = {}, {}
  for _, group in ipairs(groups) do
    if not Evaluations.has_task(group[P_LEASE_ID]) then
      ids[#ids + 1] = group[P_TASK_ID]
      leaseless[#leaseless + 1] = group[P_LEASE_ID] == '' and group[P_TASK_ID] or nil
    end
  end
  for index, raw in ipairs(#ids > 0 and call('HMGET', key('tasks'), unpack(ids)) or {}) do
    ctx.tasks[ids[index]] = raw and unpack_msg(raw) or nil
  end
  Remembered.look_up(ctx, leaseless)
end

ctx.has_filter = Filters.are_set(policy)
-- Rewards that a stage is to write are judged when it has.
ctx.judged_later = Stages.is_named(ctx, Stages.REWARDS)

-- The group waits: in the line, or by its staging alone for a resume that goes on.
local function block(group, task, attempt, is_in_line)
  if is_in_line then
    ctx.took_room = Waiting.join(ctx, group[P_PAYLOAD]) or ctx.took_room
  end
  call('ZADD', key('staging'), format('%d', ctx.now), group[P_PAYLOAD])
  if attempt > 0 and Tasks.live_expiry(ctx, group[P_TASK_ID], task, task.incarnation, attempt) then
    call('ZADD', key('leases'), format('%d', ctx.now + policy.lease_ttl_ms), Tasks.entry(group[P_TASK_ID], task))
    ctx.changed = true
  end
  return 'blocked'
end

-- Makes room by the overflow action; an outcome when there is none.
local function make_room(group, task, attempt)
  local action, tokens, bytes = policy.overflow_action, group[P_TOKENS], group[P_SIZE_BYTES]
  if action == 'block' then
    if Waiting.is_behind_others(ctx, group[P_PAYLOAD]) or not Groups.fits(ctx, 1, tokens, bytes) then
      return block(group, task, attempt, true)
    end
  elseif state.resuming then
    -- What it takes back from steps has its place first.
    return not Groups.fits(ctx, 1, tokens, bytes) and block(group, task, attempt, false) or nil
  elseif action == 'reject' then
    if Groups.fits(ctx, 1, tokens, bytes) then
      return nil
    elseif attempt > 0 then
      Groups.note_refused(ctx, tokens, bytes)
    end
    return 'rejected_full'
  elseif not Groups.makes_room(ctx) then
    error('unknown overflow_action ' .. action)
  end
  while not Groups.fits(ctx, 1, tokens, bytes) do
    if ctx.drops_left == 0 then
      return 'more'
    elseif not Groups.drop_one(ctx) then
      if not state.gathered then
        return 'rejected_full'
      end
      Gathering.give_back(ctx)
    end
    ctx.drops_left = ctx.drops_left - 1
  end
  return nil
end

-- Accepts a group; `filter` is the statistic under which it ends at once, nil when it is queued.
local function accept(group, task, attempt, filter)
  local sequence = Tasks.turn(ctx, task)
  state.leaseless = state.leaseless or attempt == 0 or nil
  local task_id, environment = group[P_TASK_ID], group[P_ENVIRONMENT]
  Accepted.add(ctx, group, task, attempt)
  if group[P_STORED] == 1 then
    Run.count(ctx, 'written_groups', 1)
    Run.count(ctx, 'written_bytes', group[P_SIZE_BYTES])
  end
  if task.state == 'leased' then
    Tasks.end_lease(ctx, task_id, task)
  elseif task.state ~= 'new' then
    Tasks.unindex(ctx, task_id, task)
  end
  Ledger.move_task(ctx, task, 'completed')
  Tasks.drop_partial_rollout(task)
  task.accepted, task.body, task.worker, task.instance = attempt, group[P_PAYLOAD], '', ''
  task.filtered, task.group, task.turn = filter and true or nil, sequence, nil
  ctx.tasks[task_id] = task
  Run.keep_back(ctx, 'HSET', key('tasks'), task_id, pack(task))
  local made = {
    format('%s/%d', task_id, group[P_INCARNATION]), task_id, sequence, group[P_PAYLOAD],
    Timeline.effective(ctx, group[P_HEAD_TERM], group[P_HEAD]),
    Timeline.effective(ctx, group[P_TAIL_TERM], group[P_TAIL]), state.term,
    group[P_SAMPLES], group[P_TOKENS], group[P_LOSS_TOKENS], group[P_SIZE_BYTES], group[P_SPANS], environment,
    task.priority,
    Timeline.effective_milli(ctx, group[P_TAIL_TERM], group[P_MEAN_MILLI]),
    Accepted.pack_responses(ctx, group),
  }
  Environments.know(ctx, environment)
  if ctx.has_filter and (filter or not ctx.judged_later) then
    Accepted.follow(ctx, not filter)
  end
  if filter then
    Run.count(ctx, filter, 1)
    Groups.move(ctx, made, 'new', 'filtered')
    Tasks.bury(ctx, task_id)
    ctx.topics.tasks = true
  else
    Groups.queue(ctx, made, 'new')
    ctx.took_room = true
  end
  if Run.is_recorded(ctx) then
    local event = {
      ctx.now, made[G_ID], sequence, environment, group[P_RESPONSE_LENGTHS], group[P_REWARDS],
      group[P_TOKENS], group[P_SIZE_BYTES],
      made[G_HEAD], made[G_TAIL], made[G_MEAN], filter and 'filtered' or 'queued', group[P_PAYLOAD],
    }
    if group[P_TRAJECTORY_REWARDS] ~= '' then
      -- Services of 0.1.0 cannot read a recording with this field.
      event[#event + 1] = group[P_TRAJECTORY_REWARDS]
      Run.refuse_first_release()
    end
    Run.record(ctx, 'accepted', event)
  end
  return filter and 'filtered' or 'queued'
end

local function push(group)
  if Evaluations.has_task(group[P_LEASE_ID]) then
    return Results.take(ctx, group, missing)
  elseif Stages.has_lease(group[P_LEASE_ID]) then
    return Stages.take(ctx, group, missing)
  end
  local task = ctx.tasks[group[P_TASK_ID]]
  if task and task.body == group[P_PAYLOAD] then
    -- This very payload was accepted by a call whose reply got lost.
    return task.filtered and 'filtered' or 'queued', true
  end
  local invalid, attempt = check_group(group)
  if invalid then
    return invalid
  elseif task then
    local verdict = judge(task, group[P_INCARNATION], attempt)
    if verdict ~= 'accept' then
      return verdict
    end
  elseif attempt > 0 then
    return 'unknown_lease'
  elseif group[P_INCARNATION] ~= 0 then
    return {'incarnation', format('%d', group[P_INCARNATION]), '0 for a task pushed without a lease'}
  else
    local refused = Remembered.recall(ctx, group[P_TASK_ID], group[P_FIRST_REVISION])
    if refused then
      return refused
    end
    task = Tasks.new(0, 0, group[P_ENVIRONMENT])
    task.leaseless = true
  end
  if not Environments.fits(ctx, group[P_ENVIRONMENT]) then
    return {'environment', group[P_ENVIRONMENT], format("one of the run's %d environments", MAX_ENVIRONMENTS)}
  end
  local filter = ctx.has_filter and Filters.ended_by(policy, group, ctx.judged_later and 'lengths' or nil) or nil
  return not filter and (missing(group) or make_room(group, task, attempt)) or accept(group, task, attempt, filter)
end

local outcomes, outcome, is_repeat = {}, nil, nil
ctx.written, ctx.settled = {}, {}
for index, group in ipairs(groups) do
  local payload, is_written = group[P_PAYLOAD], group[P_STORED] == 1
  group.is_there = PAYLOADS_APART == 1 and (not ARGV[2] or string.sub(ARGV[2], index, index) == '1')
  -- The order of the groups is kept: those behind one that has to come again come with it.
  if outcome ~= 'more' then
    outcome, is_repeat = push(group)
  end
  outcomes[index] = outcome
  Run.mark_parts(payload)
  if is_written and not is_repeat then
    ctx.written[#ctx.written + 1] = {group, outcome}
  end
  if outcome ~= 'blocked' and outcome ~= 'more' then
    ctx.settled[#ctx.settled + 1] = payload
    local lease_id = group[P_LEASE_ID]
    local counters = {duplicate = 'pushes_duplicate', closed = 'pushes_closed', rejected_full = 'pushes_rejected'}
    if counters[outcome] and not Evaluations.has_task(lease_id) and not Stages.has_lease(lease_id) then
      Run.count(ctx, counters[outcome], 1)
    end
    if not is_written and not Staging.KEPT[outcome] and not is_repeat then
      Tasks.trash(payload)
    end
    if retry == 1 or is_written and Waiting.has(payload) then
      -- In a store that is out of memory the first write must be one that takes some, to be refused. What follows may
      -- always run.
      Run.write_kept_back(ctx)
      Waiting.leave(ctx, payload)
    end
  end
end
if #ctx.written > 0 then
  Run.write_kept_back(ctx)
end
Staging.unstage(ctx.settled)
for _, each in ipairs(ctx.written) do
  Staging.settle(ctx, each[1], each[2])
end
if ctx.took_room and Tasks.are_awaited(ctx) and not Groups.leaves_room(ctx) then
  -- No batch waits for groups in flight any more.
  ctx.topics.groups = true
end
if Waiting.somebody_left(ctx) then
  if Waiting.somebody_waits() then
    ctx.topics.space = true
  elseif state.draining then
    -- A drained run's pulls wait for the last of the line.
    ctx.topics.groups = true
  end
end
-- Calls of this push that were answered with 'more' have changed something, and left the revision to the last one.
ctx.changed = ctx.changed or again == 1
Accepted.count(ctx)
return reply('pushed', Run.close(ctx, outcome == 'more'), state.term, state.version, outcomes)
