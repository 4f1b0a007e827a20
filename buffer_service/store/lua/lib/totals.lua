-- What the run is measured by: totals that only grow, named by domain/window.py.
--
-- Field `totals` of the run's record: msgpack array in the order of TOTAL_PLACES, absent while all are 0. Field
-- `trainer`: {busy_ms, wait_ms} as the trainer of this epoch said them last. List `snapshots`: for each of the last
-- publishes, oldest first, the totals right after it as {ms, version, totals...}. Hash `engine_counters`: by engine
-- {decoded_tokens, decode_busy_ms, decode_request_ms} as its worker said them last. Hash `response_lengths`: accepted
-- samples by bucket.
--
-- Field `staleness` of the run's record: msgpack array of what assembled steps had by bucket of staleness, absent
-- before the first: a count for each of STALENESS_BOUNDS and one beyond, of groups by staleness, by pre-queue and by
-- in-queue staleness, and of response tokens by staleness.
--
-- Field `reloads` of the run's record: msgpack array of what all engines' reloads have counted, absent before anything,
-- flat: for each phase how often it has ended, and ms in it. Hash `engine_reloads`: the same by engine, as its worker
-- said it last.
--
-- A total that grows is nothing that callers must have seen: it does not raise the revision by itself.

-- @include run
-- @include total_places

-- Doubles tell whole numbers apart up to here; sums stop at it.
local MOST = 9007199254740991

local totals

local function add_total(sums, place, by)
  sums[place] = math.max(-MOST, math.min(MOST, sums[place] + by))
end

local function load_totals()
  if not totals then
    local raw = call('HGET', RUN, 'totals')
    totals = raw and unpack_msg(raw) or {}
    for _, place in pairs(raw and {} or TOTAL_PLACES) do
      totals[place] = 0
    end
    before_close[#before_close + 1] = function()
      call('HSET', RUN, 'totals', pack(totals))
    end
  end
  return totals
end

local function count_total(name, by)
  if by ~= 0 then
    add_total(load_totals(), TOTAL_PLACES[name], by)
  end
end

-- Adds what counters of these names grew by since they were `before` (nil: 0). When one is smaller than it was,
-- whoever counts has begun anew.
local function total_growth(names, before, counters)
  local is_new = not before
  for index = 1, is_new and 0 or #names do
    is_new = is_new or counters[index] < before[index]
  end
  for index, name in ipairs(names) do
    count_total(name, counters[index] - (is_new and 0 or before[index]))
  end
end

-- Adds counts by staleness in versions: {versions = count} for each of what is counted by bucket.
local function count_staleness(by_staleness)
  local raw = call('HGET', RUN, 'staleness')
  local counts, buckets = raw and unpack_msg(raw) or {}, #STALENESS_BOUNDS + 1
  for place = #counts + 1, #by_staleness * buckets do
    counts[place] = 0
  end
  for index, by_versions in ipairs(by_staleness) do
    for versions, count in pairs(by_versions) do
      local bucket = 1
      while bucket < buckets and versions > STALENESS_BOUNDS[bucket] do
        bucket = bucket + 1
      end
      add_total(counts, (index - 1) * buckets + bucket, count)
    end
  end
  call('HSET', RUN, 'staleness', pack(counts))
end

-- Adds what an engine's reload counters grew by since its last report; see total_growth.
local function count_reloads(engine_id, counters)
  local said, packed = call('HGET', key('engine_reloads'), engine_id), pack(counters)
  if said == packed then
    return
  end
  call('HSET', key('engine_reloads'), engine_id, packed)
  local before, raw, is_new = said and unpack_msg(said) or counters, call('HGET', RUN, 'reloads'), false
  for place, count in ipairs(counters) do
    is_new = is_new or count < before[place]
  end
  local sums = raw and unpack_msg(raw) or {}
  for place, count in ipairs(counters) do
    sums[place] = sums[place] or 0
    add_total(sums, place, count - (is_new and 0 or before[place]))
  end
  call('HSET', RUN, 'reloads', pack(sums))
end

-- Remembers the totals as they are at the publish of a version.
local function keep_snapshot(version)
  call('RPUSH', key('snapshots'), pack({now, version, unpack(load_totals())}))
  call('LTRIM', key('snapshots'), -(WINDOW_VERSIONS + 1), -1)
end

-- What was before and what comes are not one regime.
local function forget_snapshots()
  call('DEL', key('snapshots'))
end
