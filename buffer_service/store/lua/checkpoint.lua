-- Frees replay data and tombstones, up to and including a step. Ledger counters keep what was freed.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, epoch, through_step}
-- Replies {'ok', revision, checkpointed_steps, more}; more: 1 when freeing has to go on (free.lua)
--       | {'error', 'unknown_run' | 'store_rolled_back' | 'stale_epoch' | 'run_paused' | 'not_committed', ...}
-- Complexity O(256 groups)

-- @include commit

local request = unpack_msg(ARGV[1])
local seen, epoch, through = unpack(request, 1, 3)

relieve()
local refusal = open_run(seen) or check_epoch(epoch) or check_trainer()
if refusal then
  return refusal
end
if through + 1 > state.committed_steps then
  return refuse('not_committed', through, state.committed_steps)
end
release_steps(through + 1)
local revision = close_run()
return reply('ok', revision, state.checkpointed_steps, free_some() and 1 or 0)
