-- Permits of engines to be out of service for a load: sorted set `permits` of engine ids, score: expiry (ms). Those
-- that wait for one stand in `permit_line`, score: ms of the first time they asked; the first of the line goes first,
-- so that no engine starves that is slower to ask than others. A policy that lowers the number of permits takes none
-- back; one that raises it, like a permit that is given back, hints to those who wait.

-- @include run

local Permits = {}

-- How long a permit is kept without a word from its engine.
Permits.PERMIT_TTL_MS = 60000
-- How long a waiting engine keeps its turn without a word.
Permits.TURN_TTL_MS = 5000

-- Engines that may be out of service at once; 0: any number.
function Permits.limit(ctx)
  return ctx.policy.max_unavailable_engines
end

function Permits.free(ctx)
  local limit = Permits.limit(ctx)
  return limit == 0 and math.huge or limit - call('ZCOUNT', key('permits'), format('%d', ctx.now), '+inf')
end

-- Remembers that the engine was heard of; the turn of one that was silent for too long is over.
function Permits.hear_engine(ctx, engine_id)
  local heard = call('ZSCORE', key('engines_heard'), engine_id)
  if heard and tonumber(heard) < ctx.now - Permits.TURN_TTL_MS then
    call('ZREM', key('permit_line'), engine_id)
  end
  call('ZADD', key('engines_heard'), format('%d', ctx.now), engine_id)
end

-- Whether fewer than `free` engines stand before this one, which is in the line. Sends away whose turn is over.
function Permits.is_its_turn(ctx, engine_id, free)
  local at = call('ZRANK', key('permit_line'), engine_id)
  local before, over = 0, {}
  for first = 0, at < free and -1 or at - 1, 1000 do
    local others = call('ZRANGE', key('permit_line'), first, math.min(first + 999, at - 1))
    for index, heard in ipairs(call('ZMSCORE', key('engines_heard'), unpack(others))) do
      if tonumber(heard) < ctx.now - Permits.TURN_TTL_MS then
        over[#over + 1] = others[index]
      else
        before = before + 1
      end
    end
    if before >= free then
      break
    end
  end
  call_many('ZREM', key('permit_line'), over)
  return before < free
end

-- Keeps the engine's permit, or takes a free one when it is its turn. Returns whether it has one.
function Permits.take(ctx, engine_id)
  call('ZREMRANGEBYSCORE', key('permits'), '-inf', format('(%d', ctx.now))
  if not call('ZSCORE', key('permits'), engine_id) then
    call('ZADD', key('permit_line'), 'NX', format('%d', ctx.now), engine_id)
    local free = Permits.free(ctx)
    if free <= 0 or not Permits.is_its_turn(ctx, engine_id, free) then
      return false
    end
    call('ZREM', key('permit_line'), engine_id)
  end
  call('ZADD', key('permits'), format('%d', ctx.now + Permits.PERMIT_TTL_MS), engine_id)
  return true
end

-- The engine neither has nor wants a permit.
function Permits.leave(ctx, engine_id)
  if call('ZREM', key('permits'), engine_id) + call('ZREM', key('permit_line'), engine_id) > 0 then
    ctx.topics.weights = true
  end
end
