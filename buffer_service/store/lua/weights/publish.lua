-- Makes (term, version) the published weights and commits through a step, in one decision.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, term, version, manifest, commit_through (-1: none), trainer_busy_ms (-1: not said),
--         trainer_wait_ms}
-- Replies {'published', revision, term, version, committed_steps, more}; more: 1 when freeing has to go on
--         (batches/free.lua)
--       | {'error', 'unknown_run' | 'store_rolled_back' | 'stale_term' | 'run_paused' | 'version_conflict' |
--         'step_ahead', ...}
-- Complexity O(steps), and up to 256 groups beyond retention freed

-- @include commit
-- @include totals
-- @include totals_of

local ctx = Run.context()
local request = unpack_msg(ARGV[1])
local seen, term, version, manifest, commit_through, busy_ms, wait_ms = unpack(request, 1, 7)

Run.relieve()
local refusal = Run.open(ctx, seen) or Run.check_term(ctx, term) or Commit.check_trainer(ctx)
if refusal then
  return refusal
end
local state, topics = ctx.state, ctx.topics
local manifests, commits = key('manifests'), key('commits')
local published_manifest = call('HGET', manifests, format('%d', state.version)) or ''
local is_repeat = version == state.version and manifest == published_manifest
if not is_repeat and version <= state.version then
  return refuse('version_conflict', version, state.version)
end
if commit_through >= state.next_step then
  return refuse('step_ahead', commit_through, state.next_step)
end

if commit_through >= 0 then
  Commit.commit_steps(ctx, commit_through + 1)
end
if busy_ms >= 0 then
  local said, clock = call('HGET', RUN, 'trainer'), {busy_ms, wait_ms}
  Totals.grow(ctx, TOTALS_OF.trainer, said and unpack_msg(said), clock)
  call('HSET', RUN, 'trainer', pack(clock))
end
if not is_repeat then
  local at = format('%d', state.committed_steps)
  -- A version that no step was committed between is one that no resume goes back to.
  for _, replaced in ipairs(call('ZRANGEBYSCORE', commits, at, at)) do
    call('HDEL', manifests, replaced)
  end
  call('ZREMRANGEBYSCORE', commits, at, at)
  call('ZADD', commits, at, format('%d', version))
  if manifest ~= '' then
    call('HSET', manifests, format('%d', version), manifest)
  end
  if version >= tonumber(call('HGET', RUN, 'plan_version') or math.huge) then
    Commit.forget_plan()
  end
  state.version = version
  state.published_steps = state.committed_steps
  if commit_through < 0 then
    -- Weights without a word on what they include: everything but the batches that may be prefetched.
    state.published_steps = math.max(state.committed_steps, state.next_step - ctx.policy.prefetch_batches)
  end
  Totals.keep_snapshot(ctx, version)
  ctx.changed = true
  topics.weights, topics.tasks, topics.groups = true, true, true
end
local revision = Run.close(ctx)
return reply('published', revision, state.term, state.version, state.committed_steps, Free.portion(ctx) and 1 or 0)
