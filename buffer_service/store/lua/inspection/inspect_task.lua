-- One task. Writes nothing.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {task_id}
-- Replies {'task', revision, now, ttl_ms (of leases), task}; task as Inspecting.describe_task
--       | {'error', 'unknown_run' | 'unknown_task', ...}
-- Complexity O(log tasks)

-- @include inspecting

local ctx = Run.context()
local task_id = unpack_msg(ARGV[1])[1]
if not Run.load(ctx) then
  return refuse('unknown_run')
end
local task = Tasks.load(task_id)
if not task then
  return refuse('unknown_task', task_id)
end
local member = Tasks.entry(task_id, task)
local not_before = task.state == 'pending' and call('ZSCORE', key('delayed'), member) or -1
local expiry = task.state == 'leased' and call('ZSCORE', key('leases'), member) or -1
return reply('task', ctx.state.revision, ctx.now, ctx.policy.lease_ttl_ms,
  Inspecting.describe_task(ctx, task_id, task, tonumber(not_before), tonumber(expiry)))
