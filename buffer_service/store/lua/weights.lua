-- The published weights.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {}
-- Replies {'weights', revision, epoch, version, manifest, paused} | {'error', 'unknown_run'}
-- Complexity O(1)

-- @include run

if not load_run() then
  return refuse('unknown_run')
end
local manifest = call('HGET', key('manifests'), format('%d', state.version)) or ''
return reply('weights', state.revision, state.epoch, state.version, manifest, state.paused)
