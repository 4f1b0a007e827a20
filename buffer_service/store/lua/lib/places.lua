-- Places of engines that are out of service for a load: sorted set `places` of engine ids, score: expiry (ms). A policy
-- that lowers the number takes none back; one that raises it, like a place that is given back, hints to those who wait.

-- @include run

-- How long a place is kept without a word from its engine.
local PLACE_TTL_MS = 60000

local PLACES = key('places')

-- Engines that may be out of service at once; 0: any number.
local function place_limit()
  return policy.max_unavailable_engines or 0
end

local function has_places()
  local limit = place_limit()
  return limit == 0 or call('ZCOUNT', PLACES, format('%d', now), '+inf') < limit
end

-- Keeps the engine's place, or takes a free one. Returns whether it has one.
local function take_place(engine_id)
  call('ZREMRANGEBYSCORE', PLACES, '-inf', format('(%d', now))
  if not call('ZSCORE', PLACES, engine_id) and not has_places() then
    return false
  end
  call('ZADD', PLACES, format('%d', now + PLACE_TTL_MS), engine_id)
  return true
end

local function leave_place(engine_id)
  if call('ZREM', PLACES, engine_id) == 1 then
    topics.weights = true
  end
end
