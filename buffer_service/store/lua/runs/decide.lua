-- Keeps a controller's decision, and has its knobs in effect: one for each publish, by whoever comes first.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {version at which it was made, packed decision, knobs (Knobs)}
-- Replies {'decided', 1 | 0}; 0: something newer was published, or it was decided already, or the run has no target
--       | {'error', 'unknown_run' | 'store_rolled_back', ...}
-- Complexity O(1)

-- @include run

local ctx = Run.context()
local version, decision, knobs = unpack(unpack_msg(ARGV[1]), 1, 3)

Run.relieve()
if not Run.begin(ctx) then
  return refuse('unknown_run')
end
local decided_at = tonumber(call('HGET', RUN, 'decided_at') or -1)
if (ctx.stated.target_staleness_milli or 0) == 0 or version ~= ctx.state.version or decided_at >= version then
  return reply('decided', 0)
end
local before = call('HGET', RUN, 'knobs')
call('HSET', RUN, 'decision', decision, 'decided_at', format('%d', version), 'knobs', pack(knobs))
if before ~= pack(knobs) then
  ctx.changed = true
  ctx.topics.tasks, ctx.topics.groups, ctx.topics.space = true, true, true
end
Run.close(ctx)
return reply('decided', 1)
