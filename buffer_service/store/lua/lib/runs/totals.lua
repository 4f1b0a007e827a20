-- What the run is measured by: totals that only grow, named by rules/totals.py.
--
-- Field `totals` of the run's record: msgpack array in the order of TOTAL_PLACES, absent while all are 0. Field
-- `trainer`: {busy_ms, wait_ms} as the trainer of this term said them last. List `snapshots`: for each of the last
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
--
-- ctx.totals: the totals, once they were read.

-- @include run
-- @include total_places

local Totals = {}

-- Doubles tell whole numbers apart up to here; sums stop at it.
Totals.MOST = 9007199254740991

function Totals.add(sums, place, by)
  sums[place] = math.max(-Totals.MOST, math.min(Totals.MOST, sums[place] + by))
end

function Totals.write(ctx)
  call('HSET', RUN, 'totals', pack(ctx.totals))
end

function Totals.load(ctx)
  if not ctx.totals then
    local raw = call('HGET', RUN, 'totals')
    ctx.totals = raw and unpack_msg(raw) or {}
    for _, place in pairs(raw and {} or TOTAL_PLACES) do
      ctx.totals[place] = 0
    end
    ctx.before_close[#ctx.before_close + 1] = Totals.write
  end
  return ctx.totals
end

function Totals.count(ctx, name, by)
  if by ~= 0 then
    Totals.add(Totals.load(ctx), TOTAL_PLACES[name], by)
  end
end

-- Adds what counters of these names grew by since they were `before` (nil: 0). When one is smaller than it was,
-- whoever counts has begun anew.
function Totals.grow(ctx, names, before, counters)
  local is_new = not before
  for index = 1, is_new and 0 or #names do
    is_new = is_new or counters[index] < before[index]
  end
  for index, name in ipairs(names) do
    Totals.count(ctx, name, counters[index] - (is_new and 0 or before[index]))
  end
end

-- Adds counts by staleness in versions: {versions = count} for each of what is counted by bucket.
function Totals.count_staleness(by_staleness)
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
      Totals.add(counts, (index - 1) * buckets + bucket, count)
    end
  end
  call('HSET', RUN, 'staleness', pack(counts))
end

-- Adds what an engine's reload counters grew by since its last report; see Totals.grow.
function Totals.count_reloads(engine_id, counters)
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
    Totals.add(sums, place, count - (is_new and 0 or before[place]))
  end
  call('HSET', RUN, 'reloads', pack(sums))
end

-- Remembers the totals as they are at the publish of a version.
function Totals.keep_snapshot(ctx, version)
  call('RPUSH', key('snapshots'), pack({ctx.now, version, unpack(Totals.load(ctx))}))
  call('LTRIM', key('snapshots'), -(WINDOW_VERSIONS + 1), -1)
end

-- What was before and what comes are not one regime.
function Totals.forget_snapshots()
  call('DEL', key('snapshots'))
end
