-- Frees replay data and tombstones, up to and including a step, after a commit where one comes with it. Ledger counters
-- keep what was freed.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, term, through_step, commit_through_step (-1: none)}
-- Replies {'ok', revision, committed_steps, checkpointed_steps, more}; more: 1 when freeing has to go on
--         (batches/free.lua)
--       | {'error', 'unknown_run' | 'store_rolled_back' | 'stale_term' | 'run_paused' | 'step_ahead' |
--         'not_committed' (what comes with it is committed), ...}
-- Complexity O(256 groups)

-- @include commit

local ctx = Run.context()
local request = unpack_msg(ARGV[1])
local seen, term, through, committing = unpack(request, 1, 4)

Run.relieve()
local refusal = Run.open(ctx, seen) or Run.check_term(ctx, term) or Commit.check_trainer(ctx)
if refusal then
  return refusal
end
local state = ctx.state
if committing >= state.next_step then
  return refuse('step_ahead', committing, state.next_step)
end
Commit.commit_steps(ctx, committing + 1)
if through + 1 > state.committed_steps then
  if committing >= 0 then
    Run.close(ctx)
    Free.portion(ctx)
  end
  return refuse('not_committed', through, state.committed_steps)
end
Commit.release_steps(ctx, through + 1)
local revision = Run.close(ctx)
return reply('ok', revision, state.committed_steps, state.checkpointed_steps, Free.portion(ctx) and 1 or 0)
