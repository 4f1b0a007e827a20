-- Who has not been heard of for long: engines (sorted set `engines_heard`, score: ms of the last report) and workers
-- (`workers_heard`, of the last lease request).

-- @include free
-- @include places

local SILENCE_MS = 3600000

local function silent_members(heard)
  return call('ZRANGEBYSCORE', heard, '-inf', format('(%d', now - SILENCE_MS), 'LIMIT', 0, VICTIMS)
end

-- Forgets engines that are silent, at most VICTIMS; returns how many.
local function forget_engines()
  local silent = silent_members(ENGINES_HEARD)
  if #silent > 0 then
    call('HDEL', key('engines'), unpack(silent))
    call('HDEL', key('engine_counters'), unpack(silent))
    call('HDEL', key('engine_reloads'), unpack(silent))
    for _, index in ipairs({ENGINES_HEARD, PLACES, PLACE_LINE}) do
      call('ZREM', index, unpack(silent))
    end
    changed = true
  end
  return #silent
end

-- Forgets workers that are silent and hold no lease, at most VICTIMS; one that holds a lease is looked at again after
-- as long a silence. Returns how many it looked at.
local function forget_workers()
  local heard = key('workers_heard')
  local silent = silent_members(heard)
  for _, worker_id in ipairs(silent) do
    if call('EXISTS', key('held:' .. worker_id)) == 1 then
      call('ZADD', heard, format('%d', now), worker_id)
    else
      call('ZREM', heard, worker_id)
      call('HDEL', key('workers'), worker_id)
    end
  end
  return #silent
end
