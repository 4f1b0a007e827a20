-- Places of engines that are out of service for a load: sorted set `places` of engine ids, score: expiry (ms). Those
-- that wait for one stand in `place_line`, score: ms of the first time they asked; the first of the line goes first, so
-- that no engine starves that is slower to ask than others. A policy that lowers the number of places takes none back;
-- one that raises it, like a place that is given back, hints to those who wait.

-- @include run

-- How long a place is kept without a word from its engine.
local PLACE_TTL_MS = 60000
-- How long a waiting engine keeps its turn without a word.
local TURN_TTL_MS = 5000

local PLACES, PLACE_LINE, ENGINES_HEARD = key('places'), key('place_line'), key('engines_heard')

-- Engines that may be out of service at once; 0: any number.
local function place_limit()
  return policy.max_unavailable_engines
end

local function free_places()
  local limit = place_limit()
  return limit == 0 and math.huge or limit - call('ZCOUNT', PLACES, format('%d', now), '+inf')
end

-- Remembers that the engine was heard of; the turn of one that was silent for too long is over.
local function hear_engine(engine_id)
  local heard = call('ZSCORE', ENGINES_HEARD, engine_id)
  if heard and tonumber(heard) < now - TURN_TTL_MS then
    call('ZREM', PLACE_LINE, engine_id)
  end
  call('ZADD', ENGINES_HEARD, format('%d', now), engine_id)
end

-- Whether fewer than `free` engines stand before this one, which is in the line. Sends away whose turn is over.
local function is_its_turn(engine_id, free)
  local at = call('ZRANK', PLACE_LINE, engine_id)
  local before, over = 0, {}
  for first = 0, at < free and -1 or at - 1, 1000 do
    local others = call('ZRANGE', PLACE_LINE, first, math.min(first + 999, at - 1))
    for index, heard in ipairs(call('ZMSCORE', ENGINES_HEARD, unpack(others))) do
      if tonumber(heard) < now - TURN_TTL_MS then
        over[#over + 1] = others[index]
      else
        before = before + 1
      end
    end
    if before >= free then
      break
    end
  end
  call_many('ZREM', PLACE_LINE, over)
  return before < free
end

-- Keeps the engine's place, or takes a free one when it is its turn. Returns whether it has one.
local function take_place(engine_id)
  call('ZREMRANGEBYSCORE', PLACES, '-inf', format('(%d', now))
  if not call('ZSCORE', PLACES, engine_id) then
    call('ZADD', PLACE_LINE, 'NX', format('%d', now), engine_id)
    local free = free_places()
    if free <= 0 or not is_its_turn(engine_id, free) then
      return false
    end
    call('ZREM', PLACE_LINE, engine_id)
  end
  call('ZADD', PLACES, format('%d', now + PLACE_TTL_MS), engine_id)
  return true
end

-- The engine neither has nor wants a place.
local function leave_place(engine_id)
  if call('ZREM', PLACES, engine_id) + call('ZREM', PLACE_LINE, engine_id) > 0 then
    topics.weights = true
  end
end
