-- Prolongs leases that are live.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, worker_id, instance_id, lease_ids}
-- Replies {'extended', revision, ttl_ms, live}: a 1 or 0 for each lease, in request order
--       | {'error', 'unknown_run' | 'store_rolled_back', ...}
-- Complexity O(leases * log leased)

-- @include tasks

local request = unpack_msg(ARGV[1])
local seen, worker_id, instance_id, lease_ids = unpack(request, 1, 4)

relieve()
local refusal = open_run(seen)
if refusal then
  return refusal
end

local live = {}
local expiry = format('%d', now + policy.lease_ttl_ms)
for index, id in ipairs(lease_ids) do
  local task_id, generation, attempt = parse_lease_id(id)
  local task = task_id and load_task(task_id)
  live[index] = 0
  if task and task.worker == worker_id and task.instance == instance_id
    and live_expiry(task_id, task, generation, attempt) then
    call('ZADD', LEASES, expiry, entry(task_id, task))
    live[index] = 1
    changed = true
  end
end
return reply('extended', close_run(), policy.lease_ttl_ms, live)
