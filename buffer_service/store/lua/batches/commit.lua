-- Settles delivered groups as trained, up to and including a step.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, term, through_step}
-- Replies {'ok', revision, committed_steps, more}; more: 1 when freeing has to go on (batches/free.lua)
--       | {'error', 'unknown_run' | 'store_rolled_back' | 'stale_term' | 'run_paused' | 'step_ahead', ...}
-- Complexity O(steps), and up to 256 groups beyond retention freed

-- @include commit

local ctx = Run.context()
local request = unpack_msg(ARGV[1])
local seen, term, through = unpack(request, 1, 3)

Run.relieve()
local refusal = Run.open(ctx, seen) or Run.check_term(ctx, term) or Commit.check_trainer(ctx)
if refusal then
  return refusal
end
local state = ctx.state
if through >= state.next_step then
  return refuse('step_ahead', through, state.next_step)
end
Commit.commit_steps(ctx, through + 1)
local revision = Run.close(ctx)
return reply('ok', revision, state.committed_steps, Free.portion(ctx) and 1 or 0)
