-- Who has not been heard of for long: engines (sorted set `engines_heard`, score: ms of the last report) and workers
-- (`workers_heard`, of the last lease request).

-- @include free
-- @include permits

local Silence = {}

Silence.SILENCE_MS = 3600000

function Silence.silent_members(ctx, heard)
  return call('ZRANGEBYSCORE', heard, '-inf', format('(%d', ctx.now - Silence.SILENCE_MS), 'LIMIT', 0, Free.VICTIMS)
end

-- Forgets engines that are silent, at most VICTIMS; returns how many.
function Silence.forget_engines(ctx)
  local silent = Silence.silent_members(ctx, key('engines_heard'))
  if #silent > 0 then
    call('HDEL', key('engines'), unpack(silent))
    call('HDEL', key('engine_counters'), unpack(silent))
    call('HDEL', key('engine_reloads'), unpack(silent))
    call('HDEL', key('load_lags'), unpack(silent))
    call('HDEL', key('weights_from'), unpack(silent))
    call('HDEL', key('engine_samples'), unpack(silent))
    for _, index in ipairs({key('engines_heard'), key('permits'), key('permit_line')}) do
      call('ZREM', index, unpack(silent))
    end
    ctx.changed = true
  end
  return #silent
end

-- Forgets workers that are silent and hold no lease, at most VICTIMS; one that holds a lease is looked at again after
-- as long a silence. Returns how many it looked at.
function Silence.forget_workers(ctx)
  local heard = key('workers_heard')
  local silent = Silence.silent_members(ctx, heard)
  for _, worker_id in ipairs(silent) do
    if call('EXISTS', key('held:' .. worker_id)) == 1 then
      call('ZADD', heard, format('%d', ctx.now), worker_id)
    else
      call('ZREM', heard, worker_id)
      call('HDEL', key('workers'), worker_id)
    end
  end
  return #silent
end
