-- The published weights, and the collective update to newer ones that is under way.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {}
-- Replies {'weights', revision, term, version, manifest, paused, plan, may_load} | {'error', 'unknown_run'};
--         manifest and plan: '' for none; may_load: 0 when every permit of an engine that loads is taken
-- Complexity O(log engines)

-- @include permits

local ctx = Run.context()
if not Run.load(ctx) then
  return refuse('unknown_run')
end
local state = ctx.state
local manifest = call('HGET', key('manifests'), format('%d', state.version)) or ''
local plan = call('HGET', RUN, 'plan') or ''
return reply('weights', Run.signed(ctx, state.revision), state.term, state.version, manifest, state.paused, plan,
  Permits.free(ctx) > 0 and 1 or 0)
