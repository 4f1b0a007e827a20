-- Announces a collective update of the weights, or its next phase, in place of the one before.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, epoch, version, plan}
-- Replies {'ok', revision}
--       | {'error', 'unknown_run' | 'store_rolled_back' | 'stale_epoch' | 'run_paused' | 'version_conflict', ...}
-- Complexity O(1)

-- @include commit

local request = unpack_msg(ARGV[1])
local seen, epoch, version, plan = unpack(request, 1, 4)

relieve()
local refusal = open_run(seen) or check_epoch(epoch) or check_trainer()
if refusal then
  return refusal
end
if version <= state.version then
  return refuse('version_conflict', version, state.version)
end
if call('HGET', RUN, 'plan') ~= plan then
  call('HSET', RUN, 'plan', plan, 'plan_version', format('%d', version))
  changed = true
  topics.weights = true
end
return reply('ok', close_run())
