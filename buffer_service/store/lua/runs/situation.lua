-- What a controller decides from after a publish: see domain/steering/decisions.py.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {}
-- Replies {'situation', policy as stated, version, world_size, packed decision ('' for none), held (-1: never),
--         snapshots}; nothing beside the policy where that has no target. Snapshots are packed (Totals)
--       | {'error', 'unknown_run'}
-- Complexity O(1)

-- @include run

local ctx = Run.context()
if not Run.load(ctx) then
  return refuse('unknown_run')
end
local stated, state = ctx.stated, ctx.state
if (stated.target_staleness_milli or 0) == 0 then
  return reply('situation', stated)
end
return reply('situation', stated, state.version, state.world_size, call('HGET', RUN, 'decision') or '',
  tonumber(call('HGET', RUN, 'held') or -1), call('LRANGE', key('snapshots'), 0, -1))
