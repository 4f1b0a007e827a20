-- Places of engines that are out of service for a load: sorted set `places` of engine ids, score: expiry (ms). Those
-- that wait for one stand in `place_line`, score: ms of the first time they asked; the first of the line goes first, so
-- that no engine starves that is slower to ask than others. A policy that lowers the number of places takes none back;
-- one that raises it, like a place that is given back, hints to those who wait.

-- @include run

local Places = {}

-- How long a place is kept without a word from its engine.
Places.PLACE_TTL_MS = 60000
-- How long a waiting engine keeps its turn without a word.
Places.TURN_TTL_MS = 5000

-- Engines that may be out of service at once; 0: any number.
function Places.limit(ctx)
  return ctx.policy.max_unavailable_engines
end

function Places.free(ctx)
  local limit = Places.limit(ctx)
  return limit == 0 and math.huge or limit - call('ZCOUNT', key('places'), format('%d', ctx.now), '+inf')
end

-- Remembers that the engine was heard of; the turn of one that was silent for too long is over.
function Places.hear_engine(ctx, engine_id)
  local heard = call('ZSCORE', key('engines_heard'), engine_id)
  if heard and tonumber(heard) < ctx.now - Places.TURN_TTL_MS then
    call('ZREM', key('place_line'), engine_id)
  end
  call('ZADD', key('engines_heard'), format('%d', ctx.now), engine_id)
end

-- Whether fewer than `free` engines stand before this one, which is in the line. Sends away whose turn is over.
function Places.is_its_turn(ctx, engine_id, free)
  local at = call('ZRANK', key('place_line'), engine_id)
  local before, over = 0, {}
  for first = 0, at < free and -1 or at - 1, 1000 do
    local others = call('ZRANGE', key('place_line'), first, math.min(first + 999, at - 1))
    for index, heard in ipairs(call('ZMSCORE', key('engines_heard'), unpack(others))) do
      if tonumber(heard) < ctx.now - Places.TURN_TTL_MS then
        over[#over + 1] = others[index]
      else
        before = before + 1
      end
    end
    if before >= free then
      break
    end
  end
  call_many('ZREM', key('place_line'), over)
  return before < free
end

-- Keeps the engine's place, or takes a free one when it is its turn. Returns whether it has one.
function Places.take(ctx, engine_id)
  call('ZREMRANGEBYSCORE', key('places'), '-inf', format('(%d', ctx.now))
  if not call('ZSCORE', key('places'), engine_id) then
    call('ZADD', key('place_line'), 'NX', format('%d', ctx.now), engine_id)
    local free = Places.free(ctx)
    if free <= 0 or not Places.is_its_turn(ctx, engine_id, free) then
      return false
    end
    call('ZREM', key('place_line'), engine_id)
  end
  call('ZADD', key('places'), format('%d', ctx.now + Places.PLACE_TTL_MS), engine_id)
  return true
end

-- The engine neither has nor wants a place.
function Places.leave(ctx, engine_id)
  if call('ZREM', key('places'), engine_id) + call('ZREM', key('place_line'), engine_id) > 0 then
    ctx.topics.weights = true
  end
end
