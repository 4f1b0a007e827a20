-- Replaces the policy of a run; a higher failure budget releases it.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, policy, expected policy or nil}
-- Replies {'ok', revision} | {'error', 'unknown_run' | 'store_rolled_back' | 'policy_changed' | 'invalid_policy', ...}
--       | {'more'}: many groups go on from stages that are named no more; call again
-- Complexity O(subqueues + 256 groups of stages * log queued)

-- @include ledger
-- @include queue
-- @include gathering
-- @include stages
-- @include totals

local ctx = Run.context()
local seen, wished, expected = unpack(unpack_msg(ARGV[1]), 1, 3)

Run.relieve()
local refusal = Run.open(ctx, seen)
if refusal then
  return refusal
end
-- What a controller lowered is no part of it.
ctx.policy = ctx.stated
local state, policy, topics = ctx.state, ctx.policy, ctx.topics
for name, value in pairs(expected or {}) do
  -- A field that is not stored was not known when the run was made, and nobody has changed it.
  if policy[name] ~= nil and pack(policy[name]) ~= pack(value) then
    return refuse('policy_changed')
  end
end
-- The queued groups are indexed by the ages of the present measure.
local queued = Queue.total(ctx)
if wished.staleness_measure ~= policy.staleness_measure and queued > 0 then
  return refuse('invalid_policy', 'staleness_measure', format('cannot change while %d groups are queued', queued))
end
local former = policy.stages
policy.stages = wished.stages
if Stages.leave_unnamed(ctx, wished.stages, 256) == 256 then
  Run.close(ctx, true)
  return reply('more')
end
policy.stages = former
for name, value in pairs(wished) do
  if pack(policy[name]) ~= pack(value) then
    policy[name] = value
    ctx.changed = true
  end
end
if ctx.changed then
  call('HSET', RUN, 'policy', pack(policy))
  Run.mark_policy(policy)
  Totals.forget_snapshots()
  if not Tasks.heads_are_awaited(ctx) then
    call('DEL', key('lease_heads'))
  end
  if not Tasks.turns_are_awaited(ctx) then
    call('DEL', key('lease_turns'))
  end
  if policy.order ~= 'submission' and state.turns then
    -- What comes from now on comes after all that has a turn.
    state.sequence, state.turns = math.max(state.sequence, state.turns), nil
  end
  Gathering.void(ctx)
  topics.groups, topics.tasks, topics.space, topics.weights = true, true, true, true
  if not Picking.shares_on(ctx) then
    call('HDEL', RUN, 'queue_stride', 'lease_stride')
  end
  Run.recompute_pause(ctx)
end
return reply('ok', Run.close(ctx))
