-- The run's own record: policy, clock, counters. KEYS[1] is the hash rb:{R}:run; every other index key of the run has
-- the same hash tag and is made from it with `key`.
--
-- Fields of the hash: policy, state and ledger (msgpack), now (ms, the run's clock), lag (ms, see Run.read_clock),
-- asked (ms, the last lease request), needed (queued groups that the last short pull waits for), feeder (bytes),
-- last_submit and last_resume (msgpack, their replies), queue_stride and lease_stride (msgpack, Picking),
-- totals, trainer, staleness and reloads (Totals), stale_wait (MicroBatches.awaited), refused (Groups.leaves_room),
-- decision, decided_at (the version for which it was made) and knobs of a controller (runs/decide.lua), held (version
-- at which these last held an engine back), plan (bytes) and plan_version of the collective update that is under way,
-- above the published one; secret, of the proofs of revisions, which nothing shows.
--
-- state: revision, term, version (published), next_step, micro-batches (closed ones of the step that is being formed),
-- committed_steps, checkpointed_steps, freed_steps (steps below are physically gone), published_steps (that the last
-- publish covered), world_size, cursor, sequence, turns (the last one given, Tasks.turn, absent before), tickets (given
-- to blocked pushes), ended_sequence, ended_through (tombstones up to it may go), leaseless (true once a group was
-- accepted without a lease, absent before), forgotten (Remembered), retained_bytes (of trained steps that are not
-- checkpointed), created_ms, paused, held, draining, resuming (Resuming), gathered (Gathering), staged_tokens
-- (Queue), stage_leases (Stages), seen (highest revision that a caller proved while the store was behind it),
-- last_error, forks ({{term, version}, ...}).

-- Libraries are tables, named as their files with a capital; what one call knows is in `ctx`, which they pass along.

-- @include reply
-- @include keys
-- @include parts

local Run = {}

-- All that one call of a script knows of its run, and has decided: policy (the one in effect), state, ledger, now and
-- secret once the run is loaded, and
--   stated: the policy as it was stated, of which a controller may have lowered something;
--   claimed: what the caller has seen, {revision, proof};
--   stored_now, lag, stored_lag: the clock as it is stored, by how much it is behind the host's, and that as stored;
--   changed: the revision has to rise; topics: hints that are due, {topic = true};
--   wanted: queued groups at which a hint to pulls is due;
--   before_close: functions of `ctx` that Run.close calls first, to write what libraries kept back;
--   kept_back: writes by command and key, with the arguments of each in one list.
-- Libraries keep what they read and count under names of their own, which each file's head lists.
function Run.context()
  return {stored_now = 0, lag = 0, stored_lag = 0, changed = false, topics = {}, before_close = {}, kept_back = {}}
end

-- Makes the later writes of this script legal in a store that is out of memory: the check ends with a script's first
-- write, and HDEL may always run. Only scripts that free memory or grow it by little may call it.
-- Where the store's disk is full it is refused, as every write is after it; what the script only reads it still finds.
function Run.relieve()
  redis.pcall('HDEL', RUN, '')
end

-- By how much a run's clock goes on at most from one look to the next. Replicas look once a second, so more has passed
-- only while nobody could come: the host's clock jumped, or everything stood still. That is nobody's silence.
Run.CLOCK_STEP_MS = 2000

-- The run's clock goes with the host's, never back and never by a jump.
function Run.read_clock(ctx)
  local test = call('GET', key('test_now'))
  if test then
    ctx.now = math.max(ctx.stored_now, tonumber(test))
    return
  end
  local time = call('TIME')
  local host = time[1] * 1000 + floor(time[2] / 1000)
  ctx.now = host - ctx.lag
  if ctx.stored_now > 0 then
    ctx.now = math.max(ctx.stored_now, math.min(ctx.now, ctx.stored_now + Run.CLOCK_STEP_MS))
    ctx.lag = host - ctx.now
  end
end

-- Ends the script where a record's field `layout` is none that this service knows. An error and no reply: wherever this
-- is called from, nothing comes after it.
function Run.check_layout(found)
  if found ~= '$SCHEMA_VERSION' and found ~= '$SCHEMA_VERSIONp' then
    error('rb-layout ' .. tostring(found))
  end
end

-- Gives a run the layout that services of 0.1.0 refuse, from when it has what they would damage: payloads in parts,
-- which they would take for lost; turns (Tasks.turn), beside which they would number groups on their own; rejected
-- groups, which they would not make up for; recorded rewards of trajectories, which they cannot read; or what
-- Run.mark_policy names.
function Run.refuse_first_release()
  call('HSET', RUN, 'layout', '$SCHEMA_VERSIONp')
end

-- Their rules of environments have no limits, what they accept passes no stages, and they free what is used again.
function Run.mark_policy(policy)
  local is_theirs = not policy.stages[1] and (policy.max_uses or 1) == 1
  for _, rule in ipairs(policy.environments) do
    is_theirs = is_theirs and not rule[4]
  end
  if not is_theirs then
    Run.refuse_first_release()
  end
end

function Run.mark_parts(payload)
  local _, count = Parts.of(payload)
  if count > 0 then
    Run.refuse_first_release()
  end
end

-- The policy that is in effect, as domain/steering/knobs.py has it: the stated one with a controller's knobs.
-- `lookahead_milli` is max_lookahead in thousandths, whose fraction the policy rounds up.
function Run.in_effect(stated, knobs, world_size)
  if (stated.target_staleness_milli or 0) == 0 then
    return stated
  end
  local micro, room, ahead, in_flight = unpack(knobs, 1, 4)
  local lowered = {}
  for name, value in pairs(stated) do
    lowered[name] = value
  end
  -- Each micro-batch may be a full queue, of which quotas in tokens and bytes must hold as many.
  if micro > 0 and stated.quota_tokens == 0 and stated.quota_bytes == 0 then
    lowered.micro_batch_groups = math.min(stated.micro_batch_groups, micro)
  end
  -- Whoever waits for groups in flight needs room for all that is admitted. Before a term's first pull nobody knows
  -- what one takes.
  if room > 0 and world_size > 0 and stated.stale_action ~= 'wait' and stated.order ~= 'submission' then
    local least = stated.batch_groups
    if stated.micro_batch_groups > 0 then
      least = 2 * stated.micro_batch_groups * world_size
    end
    lowered.max_queued_groups = math.min(stated.max_queued_groups, math.max(room, least))
  end
  if ahead >= 0 then
    local held = stated.prefetch_batches + stated.batches_per_publish - 1
    ahead = math.max(ahead, 1000 * floor(held / stated.batches_per_publish))
    if stated.max_lookahead >= 0 then
      ahead = math.min(ahead, 1000 * stated.max_lookahead)
    end
    lowered.lookahead_milli, lowered.max_lookahead = ahead, math.ceil(ahead / 1000)
  end
  if in_flight > 0 then
    local most = stated.max_inflight_groups > 0 and stated.max_inflight_groups or in_flight
    lowered.max_inflight_groups = math.min(most, in_flight)
  end
  return lowered
end

-- Loads policy, state and ledger; false when there is no such run. Ends the script where the record's field `layout`
-- names one that is not ours.
function Run.load(ctx)
  local raw = call('HMGET', RUN, 'policy', 'state', 'ledger', 'now', 'needed', 'layout', 'lag', 'secret', 'knobs')
  if not raw[2] then
    return false
  end
  Run.check_layout(raw[6])
  ctx.stated, ctx.state, ctx.ledger = unpack_msg(raw[1]), unpack_msg(raw[2]), unpack_msg(raw[3])
  ctx.policy = raw[9] and Run.in_effect(ctx.stated, unpack_msg(raw[9]), ctx.state.world_size) or ctx.stated
  ctx.stored_now, ctx.stored_lag, ctx.secret = tonumber(raw[4]), tonumber(raw[7] or 0), raw[8]
  ctx.lag = ctx.stored_lag
  ctx.wanted = tonumber(raw[5] or ctx.policy.batch_groups)
  Run.read_clock(ctx)
  return true
end

function Run.write(ctx)
  call('HSET', RUN, 'state', pack(ctx.state), 'ledger', pack(ctx.ledger))
end

-- Loads the run for an operation that may change it, and remembers the time, whatever becomes of the operation.
function Run.begin(ctx)
  if not Run.load(ctx) then
    return false
  end
  if ctx.now ~= ctx.stored_now or ctx.lag ~= ctx.stored_lag then
    -- As in Run.relieve.
    redis.pcall('HSET', RUN, 'now', format('%d', ctx.now), 'lag', format('%d', ctx.lag))
  end
  return true
end

function Run.budget_exceeded(ctx)
  local policy = ctx.policy
  return policy.failure_budget >= 0 and ctx.ledger.tasks.failed > policy.failure_budget
end

-- Pauses or releases the run. A rolled-back store outranks a resume that goes on, that the operator, and the operator
-- the failure budget.
function Run.recompute_pause(ctx)
  local state, topics = ctx.state, ctx.topics
  if state.paused == 'store_rolled_back' then
    return
  end
  local paused = ''
  if state.resuming then
    paused = 'resuming'
  elseif state.held then
    paused = 'operator'
  elseif Run.budget_exceeded(ctx) then
    paused = 'failure_budget_exceeded'
  end
  if paused ~= state.paused then
    state.paused = paused
    ctx.changed = true
    topics.weights, topics.tasks, topics.groups, topics.stages = true, true, true, true
  end
end

-- Remembers how many queued groups a pull waits for.
function Run.want_groups(ctx, groups)
  if groups ~= ctx.wanted then
    ctx.wanted = groups
    call('HSET', RUN, 'needed', format('%d', groups))
  end
end

function Run.is_recorded(ctx)
  return ctx.policy.record_groups ~= 0
end

-- Appends an event to the run's recording, where its policy asks for one. `fields` begin with the time.
function Run.record(ctx, kind, fields)
  if Run.is_recorded(ctx) then
    call('XADD', key('record'), 'MAXLEN', '~', 1000000, '*', 'k', kind, 'd', pack(fields))
  end
end

-- A revision as replies carry it that acknowledge something: {revision, proof}. Nobody else can make the proof.
function Run.signed(ctx, revision)
  return {revision, ctx.secret and string.sub(redis.sha1hex(ctx.secret .. ':' .. format('%d', revision)), 1, 16) or ''}
end

-- Pauses the run: the store has lost what led to the revision `seen`. Returns the refusal.
function Run.roll_back(ctx, seen)
  local state = ctx.state
  if state.paused ~= 'store_rolled_back' or state.seen < seen then
    state.paused = 'store_rolled_back'
    if state.seen < seen then
      state.seen = seen
    end
    Run.write(ctx)
    call('PUBLISH', key('notify'), 'weights,tasks,groups,space,stages,evaluations,results')
  end
  return refuse('store_rolled_back', seen, state.revision)
end

-- Loads the run and checks that the store is not behind what the caller has seen, {revision, proof}. Returns a refusal,
-- or nil. A revision that we have not given out says nothing of the store: it is that of a deleted run, or made up.
function Run.open(ctx, claim)
  if not Run.begin(ctx) then
    return refuse('unknown_run')
  end
  ctx.claimed = claim
  local seen, proof = claim[1], claim[2]
  if seen > ctx.state.revision then
    if not ctx.secret or proof ~= Run.signed(ctx, seen)[2] then
      return refuse('unproven_revision', seen, ctx.state.revision)
    end
    return Run.roll_back(ctx, seen)
  end
  return nil
end

-- Whether the caller's proof is of another run: a deleted one of this name, whose terms come again.
function Run.is_of_another_run(ctx)
  local claimed = ctx.claimed
  return claimed and ctx.secret and claimed[1] > 0 and claimed[2] ~= '' and claimed[2] ~= Run.signed(ctx, claimed[1])[2]
end

function Run.check_term(ctx, term)
  local state = ctx.state
  if term ~= state.term or Run.is_of_another_run(ctx) then
    return refuse('stale_term', term, state.term)
  end
  return nil
end

-- Refuses what begins something new, while the run is paused.
function Run.check_paused(ctx)
  local state = ctx.state
  if state.paused == 'failure_budget_exceeded' then
    return refuse('failure_budget_exceeded', ctx.ledger.tasks.failed, ctx.policy.failure_budget, state.last_error)
  elseif state.paused ~= '' then
    return refuse('run_paused', state.paused)
  end
  return nil
end

-- Refuses while the store is known to have lost acknowledged writes.
function Run.check_rolled_back(ctx)
  local state = ctx.state
  if state.paused == 'store_rolled_back' then
    return refuse('run_paused', state.paused)
  end
  return nil
end

-- Keeps a write back, of a member or of one with its score or value: those of one key go in one command. A key takes
-- one kind of command in a call, and whoever reads it has what was kept back written first.
function Run.keep_back(ctx, command, at, first, second)
  local by_key = ctx.kept_back[command] or {}
  ctx.kept_back[command] = by_key
  local arguments = by_key[at] or {}
  by_key[at] = arguments
  arguments[#arguments + 1] = first
  arguments[#arguments + 1] = second
end

function Run.write_kept_back(ctx)
  for command, by_key in pairs(ctx.kept_back) do
    for at, arguments in pairs(by_key) do
      call_many(command, at, arguments)
    end
  end
  ctx.kept_back = {}
end

-- Ends the script: raises the revision if anything changed, writes what was kept back, publishes hints. Called once.
-- Returns the signed revision.
-- `goes_on`: the operation has further calls, and leaves the revision to the last one. Only what that one answers is
-- acknowledged, and a store that has lost it must be found out by its revision.
function Run.close(ctx, goes_on)
  local state, topics = ctx.state, ctx.topics
  for _, finish in ipairs(ctx.before_close) do
    finish(ctx)
  end
  Run.write_kept_back(ctx)
  if ctx.changed then
    if not goes_on then
      state.revision = state.revision + 1
    end
    Run.write(ctx)
  end
  if next(topics) then
    local names = {}
    for name in pairs(topics) do
      names[#names + 1] = name
    end
    table.sort(names)
    call('PUBLISH', key('notify'), table.concat(names, ','))
  end
  return Run.signed(ctx, state.revision)
end

function Run.count(ctx, name, by)
  local statistics = ctx.ledger.statistics
  statistics[name] = statistics[name] + by
  ctx.changed = true
end
