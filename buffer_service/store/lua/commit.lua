-- Settles delivered groups as trained, up to and including a step.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, epoch, through_step}
-- Replies {'ok', revision, committed_steps, more}; more: 1 when freeing has to go on (free.lua)
--       | {'error', 'unknown_run' | 'store_rolled_back' | 'stale_epoch' | 'run_paused' | 'step_ahead', ...}
-- Complexity O(steps), and up to 256 groups beyond retention freed

-- @include commit

local request = unpack_msg(ARGV[1])
local seen, epoch, through = unpack(request, 1, 3)

relieve()
local refusal = open_run(seen) or check_epoch(epoch) or check_trainer()
if refusal then
  return refusal
end
if through >= state.next_step then
  return refuse('step_ahead', through, state.next_step)
end
commit_steps(through + 1)
local revision = close_run()
return reply('ok', revision, state.committed_steps, free_some() and 1 or 0)
