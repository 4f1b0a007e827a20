-- Fresh starts: an engine that is about to load the published weights gets no new task until it has them. So no group
-- begins a version older than it has to. How long a load takes, from the publish on, an engine's own loads tell: hash
-- `load_lags`, by engine, ms. Who has not loaded yet waits for nothing.

-- @include timeline

local FreshStart = {}

-- A wait for a load may take this share of the time between two publishes, and a load so many times as long as the
-- last one.
FreshStart.SHARE = 8
FreshStart.PATIENCE = 2
-- A lag may grow to so many ms more than twice the one before: one slow load turns nothing off.
FreshStart.GROWTH_MS = 10
-- Longest lag, in ms, that counts as a load; an engine that was away for longer says nothing of the next one.
FreshStart.MOST_MS = 600000

-- When the published version and the one before it were published; nil: not known.
function FreshStart.publishes(ctx)
  local last = call('LRANGE', key('snapshots'), -2, -1)
  local published = #last > 0 and unpack_msg(last[#last])
  if not published or published[2] ~= ctx.state.version then
    return nil
  end
  return published[1], #last > 1 and unpack_msg(last[1])[1] or nil
end

-- Learns how long the engine's load took, where this report is the first to say the published version.
-- `said`: the engine's last report; nil for the first.
function FreshStart.learn(ctx, engine_id, said, report)
  local version = ctx.state.version
  if not said or Timeline.effective(ctx, report[4], report[5]) ~= version
    or Timeline.effective(ctx, said[4], said[5]) >= version then
    return
  end
  local published_at = FreshStart.publishes(ctx)
  if published_at and ctx.now - published_at <= FreshStart.MOST_MS then
    local last = tonumber(call('HGET', key('load_lags'), engine_id) or FreshStart.MOST_MS)
    local lag = math.min(ctx.now - published_at, 2 * last + FreshStart.GROWTH_MS)
    call('HSET', key('load_lags'), engine_id, format('%d', lag))
  end
end

-- Whether an engine that is behind the published weights should load them before it begins anything new.
function FreshStart.is_due(ctx, engine_id)
  -- A replica of an older version may have created the run.
  local limit = ctx.policy.fresh_start_ms or 0
  local lag = limit > 0 and tonumber(call('HGET', key('load_lags'), engine_id) or nil)
  if not lag or lag > limit then
    return false
  end
  local published_at, before = FreshStart.publishes(ctx)
  if not before or lag * FreshStart.SHARE > published_at - before then
    return false
  end
  return ctx.now - published_at <= math.min(limit, lag * FreshStart.PATIENCE)
end
