-- Prolongs leases of evaluations' tasks that are live.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, worker_id, instance_id, lease_ids}
-- Replies {'extended', revision, ttl_ms, states}: 'live' | 'lost' for each lease, in request order
--       | {'error', 'unknown_run' | 'store_rolled_back', ...}
-- Complexity O(leases * log leased)

-- @include evaluations

local ctx = Run.context()
local request = unpack_msg(ARGV[1])
local seen, worker_id, instance_id, lease_ids = unpack(request, 1, 4)

Run.relieve()
local refusal = Run.open(ctx, seen)
if refusal then
  return refusal
end
local policy = ctx.policy
local states = {}
local expiry = format('%d', ctx.now + policy.lease_ttl_ms)
for at, id in ipairs(lease_ids) do
  states[at] = 'lost'
  local eval_id, number, index, attempt = Evaluations.parse_lease_id(id)
  local evaluation, task
  if eval_id then
    evaluation, task = Evaluations.find_leased(eval_id, number, index)
  end
  if task and Evaluations.is_live(ctx, eval_id, evaluation, index, task, attempt, worker_id, instance_id) then
    call('ZADD', key('eval_leases'), expiry, Evaluations.lease_member(eval_id, evaluation, index, worker_id))
    states[at] = 'live'
    ctx.changed = true
  end
end
return reply('extended', Run.close(ctx), policy.lease_ttl_ms, states)
