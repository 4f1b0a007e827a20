-- Prolongs leases of evaluations' tasks that are live.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, worker_id, instance_id, lease_ids}
-- Replies {'extended', revision, ttl_ms, states}: 'live' | 'lost' for each lease, in request order
--       | {'error', 'unknown_run' | 'store_rolled_back', ...}
-- Complexity O(leases * log leased)

-- @include evaluations

local request = unpack_msg(ARGV[1])
local seen, worker_id, instance_id, lease_ids = unpack(request, 1, 4)

relieve()
local refusal = open_run(seen)
if refusal then
  return refusal
end
local states = {}
local expiry = format('%d', now + policy.lease_ttl_ms)
for at, id in ipairs(lease_ids) do
  states[at] = 'lost'
  local eval_id, number, index, attempt = parse_eval_lease(id)
  local evaluation, task
  if eval_id then
    evaluation, task = find_leased(eval_id, number, index)
  end
  if task and is_live_eval(eval_id, evaluation, index, task, attempt, worker_id, instance_id) then
    call('ZADD', EVAL_LEASES, expiry, lease_member(eval_id, evaluation, index, worker_id))
    states[at] = 'live'
    changed = true
  end
end
return reply('extended', close_run(), policy.lease_ttl_ms, states)
