-- Announces a collective update of the weights, or its next phase, in place of the one before.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, term, version, plan}
-- Replies {'ok', revision}
--       | {'error', 'unknown_run' | 'store_rolled_back' | 'stale_term' | 'run_paused' | 'version_conflict', ...}
-- Complexity O(1)

-- @include commit

local ctx = Run.context()
local request = unpack_msg(ARGV[1])
local seen, term, version, plan = unpack(request, 1, 4)

Run.relieve()
local refusal = Run.open(ctx, seen) or Run.check_term(ctx, term) or Commit.check_trainer(ctx)
if refusal then
  return refusal
end
local state = ctx.state
if version <= state.version then
  return refuse('version_conflict', version, state.version)
end
if call('HGET', RUN, 'plan') ~= plan then
  call('HSET', RUN, 'plan', plan, 'plan_version', format('%d', version))
  ctx.changed = true
  ctx.topics.weights = true
end
return reply('ok', Run.close(ctx))
