-- The run's own record: policy, clock, counters. KEYS[1] is the hash rb:{R}:run; every other index key of the run has
-- the same hash tag and is made from it with `key`.
--
-- Fields of the hash: policy, state and ledger (msgpack), now (ms, the run's clock), lag (ms, see read_clock), asked
-- (ms, the last lease request), needed (queued groups that the last short pull waits for), feeder (bytes), last_submit
-- and last_resume (msgpack, their replies), queue_stride and lease_stride (msgpack, lib/picking.lua), totals, trainer,
-- staleness and reloads (lib/totals.lua), plan (bytes) and plan_version of the collective update that is under way,
-- above the published one; secret, of the proofs of revisions, which nothing shows.
--
-- state: revision, epoch, version (published), next_step, rounds (closed ones of the step that is being formed),
-- committed_steps, checkpointed_steps, freed_steps (steps below are physically gone), published_steps (that the last
-- publish covered), world_size, cursor, sequence, tickets (given to blocked pushes), ended_sequence, ended_through
-- (tombstones up to it may go), leaseless (true once a group was accepted without a lease, absent before), forgotten
-- (lib/remembered.lua), retained_bytes (of trained steps that are not checkpointed), created_ms, paused, held,
-- draining, resuming (lib/resuming.lua), gathered (lib/gathering.lua), seen (highest revision that a caller proved
-- while the store was behind it), last_error, forks ({{epoch, version}, ...}).

-- @include reply
-- @include keys

local policy, state, ledger, now, secret
-- What the caller has seen, {revision, proof}.
local claimed
local stored_now = 0
-- By how much the run's clock is behind the host's; and as it is stored.
local lag, stored_lag = 0, 0
local changed = false
local topics = {}
-- Queued groups at which a hint to pulls is due.
local wanted
-- What close_run calls first: writes that libraries keep back until the script's end.
local before_close = {}

-- Makes the later writes of this script legal in a store that is out of memory: the check ends with a script's first
-- write, and HDEL may always run. Only scripts that free memory or grow it by little may call it.
-- Where the store's disk is full it is refused, as every write is after it; what the script only reads it still finds.
local function relieve()
  redis.pcall('HDEL', RUN, '')
end

-- By how much a run's clock goes on at most from one look to the next. Replicas look once a second, so more has passed
-- only while nobody could come: the host's clock jumped, or everything stood still. That is nobody's silence.
local CLOCK_STEP_MS = 2000

-- The run's clock goes with the host's, never back and never by a jump.
local function read_clock()
  local test = call('GET', key('test_now'))
  if test then
    now = math.max(stored_now, tonumber(test))
    return
  end
  local time = call('TIME')
  local host = time[1] * 1000 + floor(time[2] / 1000)
  now = host - lag
  if stored_now > 0 then
    now = math.max(stored_now, math.min(now, stored_now + CLOCK_STEP_MS))
    lag = host - now
  end
end

-- Loads policy, state and ledger; false when there is no such run. Ends the script where the record's field `layout`
-- names another version than ours.
local function load_run()
  local raw = call('HMGET', RUN, 'policy', 'state', 'ledger', 'now', 'needed', 'layout', 'lag', 'secret')
  if not raw[2] then
    return false
  end
  -- A service of another version has taken the run over. An error and no reply: wherever this is called from, nothing
  -- comes after it.
  if raw[6] ~= '$SCHEMA_VERSION' then
    error('rb-layout ' .. tostring(raw[6]))
  end
  policy, state, ledger = unpack_msg(raw[1]), unpack_msg(raw[2]), unpack_msg(raw[3])
  stored_now, stored_lag, secret = tonumber(raw[4]), tonumber(raw[7] or 0), raw[8]
  lag = stored_lag
  wanted = tonumber(raw[5] or policy.batch_groups)
  read_clock()
  return true
end

local function write_run()
  call('HSET', RUN, 'state', pack(state), 'ledger', pack(ledger))
end

-- Loads the run for an operation that may change it, and remembers the time, whatever becomes of the operation.
local function begin_run()
  if not load_run() then
    return false
  end
  if now ~= stored_now or lag ~= stored_lag then
    -- As in relieve.
    redis.pcall('HSET', RUN, 'now', format('%d', now), 'lag', format('%d', lag))
  end
  return true
end

local function budget_exceeded()
  return policy.failure_budget >= 0 and ledger.tasks.failed > policy.failure_budget
end

-- Pauses or releases the run. A rolled-back store outranks a resume that goes on, that the operator, and the operator
-- the failure budget.
local function recompute_pause()
  if state.paused == 'store_rolled_back' then
    return
  end
  local paused = ''
  if state.resuming then
    paused = 'resuming'
  elseif state.held then
    paused = 'operator'
  elseif budget_exceeded() then
    paused = 'failure_budget_exceeded'
  end
  if paused ~= state.paused then
    state.paused = paused
    changed = true
    topics.weights, topics.tasks, topics.groups = true, true, true
  end
end

-- Remembers how many queued groups a pull waits for.
local function want_groups(groups)
  if groups ~= wanted then
    wanted = groups
    call('HSET', RUN, 'needed', format('%d', groups))
  end
end

local function is_recorded()
  return policy.record_groups ~= 0
end

-- Appends an event to the run's recording, where its policy asks for one. `fields` begin with the time.
local function record(kind, fields)
  if is_recorded() then
    call('XADD', key('record'), 'MAXLEN', '~', 1000000, '*', 'k', kind, 'd', pack(fields))
  end
end

-- A revision as replies carry it that acknowledge something: {revision, proof}. Nobody else can make the proof.
local function signed(revision)
  return {revision, secret and string.sub(redis.sha1hex(secret .. ':' .. format('%d', revision)), 1, 16) or ''}
end

-- Pauses the run: the store has lost what led to the revision `seen`. Returns the refusal.
local function roll_back(seen)
  if state.paused ~= 'store_rolled_back' or state.seen < seen then
    state.paused = 'store_rolled_back'
    if state.seen < seen then
      state.seen = seen
    end
    write_run()
    call('PUBLISH', key('notify'), 'weights,tasks,groups,space,evaluations,results')
  end
  return refuse('store_rolled_back', seen, state.revision)
end

-- Loads the run and checks that the store is not behind what the caller has seen, {revision, proof}. Returns a refusal,
-- or nil. A revision that we have not given out says nothing of the store: it is that of a deleted run, or made up.
local function open_run(claim)
  if not begin_run() then
    return refuse('unknown_run')
  end
  claimed = claim
  local seen, proof = claim[1], claim[2]
  if seen > state.revision then
    if not secret or proof ~= signed(seen)[2] then
      return refuse('unproven_revision', seen, state.revision)
    end
    return roll_back(seen)
  end
  return nil
end

-- Whether the caller's proof is of another run: a deleted one of this name, whose epochs come again.
local function is_of_another_run()
  return claimed and secret and claimed[1] > 0 and claimed[2] ~= '' and claimed[2] ~= signed(claimed[1])[2]
end

local function check_epoch(epoch)
  if epoch ~= state.epoch or is_of_another_run() then
    return refuse('stale_epoch', epoch, state.epoch)
  end
  return nil
end

-- Refuses what begins something new, while the run is paused.
local function check_paused()
  if state.paused == 'failure_budget_exceeded' then
    return refuse('failure_budget_exceeded', ledger.tasks.failed, policy.failure_budget, state.last_error)
  elseif state.paused ~= '' then
    return refuse('run_paused', state.paused)
  end
  return nil
end

-- Refuses while the store is known to have lost acknowledged writes.
local function check_rolled_back()
  if state.paused == 'store_rolled_back' then
    return refuse('run_paused', state.paused)
  end
  return nil
end

-- Ends the script: raises the revision if anything changed, writes what was kept back, publishes hints. Called once.
-- Returns the signed revision.
-- `goes_on`: the operation has further calls, and leaves the revision to the last one. Only what that one answers is
-- acknowledged, and a store that has lost it must be found out by its revision.
local function close_run(goes_on)
  for _, finish in ipairs(before_close) do
    finish()
  end
  if changed then
    if not goes_on then
      state.revision = state.revision + 1
    end
    write_run()
  end
  if next(topics) then
    local names = {}
    for name in pairs(topics) do
      names[#names + 1] = name
    end
    table.sort(names)
    call('PUBLISH', key('notify'), table.concat(names, ','))
  end
  return signed(state.revision)
end

local function stat(name, by)
  local statistics = ledger.statistics
  statistics[name] = statistics[name] + by
  changed = true
end
