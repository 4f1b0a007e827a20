-- Prolongs leases that are live, and cancels those whose groups could no longer be fresh, where the policy asks for it.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, worker_id, instance_id, lease_ids}
-- Replies {'extended', revision, ttl_ms, states}: 'live' | 'lost' | 'cancelled' for each lease, in request order
--       | {'error', 'unknown_run' | 'store_rolled_back', ...}
-- Complexity O(leases * log leased)

-- @include stages
-- @include tasks
-- @include timeline

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
-- The oldest lease_head that is not cancelled. While a resume goes on, the next train_version is not known.
local oldest_head = 0
if policy.cancel_stale_leases ~= 0 and not ctx.state.resuming then
  oldest_head = Timeline.first_train_version(ctx) - policy.max_staleness
end

-- The task's lease ends with it; the work goes on anew, from the beginning.
local function cancel(task_id, task)
  Run.count(ctx, 'leases_cancelled', 1)
  if task.payload ~= '' then
    Tasks.discard_partial_rollout(ctx, task)
  end
  Tasks.reopen(ctx, task_id, task, ctx.now)
end

-- Prolongs the lease of a group in a stage; false where it is lost.
local function prolong_stage(id)
  local task_id = Stages.parse(id)
  local member = task_id and Stages.find(Tasks.load(task_id), id, worker_id, instance_id)
  if not member or not Stages.live_expiry(ctx, member) then
    return false
  end
  call('ZADD', key('stage_leases'), expiry, member)
  ctx.changed = true
  return true
end

for index, id in ipairs(lease_ids) do
  local task_id, incarnation, attempt = Tasks.parse_lease_id(id)
  local task = task_id and Tasks.load(task_id)
  states[index] = Stages.has_lease(id) and prolong_stage(id) and 'live' or 'lost'
  if task and task.worker == worker_id and task.instance == instance_id
    and Tasks.live_expiry(ctx, task_id, task, incarnation, attempt) then
    if not task.evaluation and Timeline.effective(ctx, task.lease_term, task.lease_head) < oldest_head then
      cancel(task_id, task)
      states[index] = 'cancelled'
    else
      call('ZADD', Tasks.leases_of(task), expiry, Tasks.entry(task_id, task))
      states[index] = 'live'
      ctx.changed = true
    end
  end
end
return reply('extended', Run.close(ctx), policy.lease_ttl_ms, states)
