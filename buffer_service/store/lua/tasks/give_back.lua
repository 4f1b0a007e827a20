-- Returns leases, with what their attempts leave behind. Continuations are stored before; those of lost leases go to
-- trash.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, worker_id, instance_id, returns}; a return is {lease_id, 'interrupted' | 'failed', error,
--         payload key of the continuation ('' for none), head_epoch, head (-1: none), tokens}
-- Replies {'returned', revision, outcomes}: 'pending' | 'failed' | 'lost' for each, in request order
--       | {'error', 'unknown_run' | 'store_rolled_back', ...}: the continuations' keys are on trash where there is a
--         run
-- Complexity O(returns * log tasks)

-- @include tasks
-- @include staging

local ctx = Run.context()
local request = unpack_msg(ARGV[1])
local seen, worker_id, instance_id, returns = unpack(request, 1, 4)

local payloads = {}
for _, given in ipairs(returns) do
  if given[4] ~= '' then
    payloads[#payloads + 1] = given[4]
  end
end

if #payloads == 0 then
  Run.relieve()
end
local refusal = Run.open(ctx, seen)
if refusal then
  if ctx.state then
    Staging.discard(payloads)
  end
  return refusal
end

local outcomes = {}
for index, given in ipairs(returns) do
  local task_id, generation, attempt = Tasks.parse_lease_id(given[1])
  local task = task_id and Tasks.load(task_id)
  if task and task.worker == worker_id and task.instance == instance_id
    and Tasks.live_expiry(ctx, task_id, task, generation, attempt) then
    Run.count(ctx, 'leases_returned', 1)
    if given[4] ~= '' then
      Tasks.trash(task.payload)
      task.payload, task.head_epoch, task.head, task.tokens = given[4], given[5], given[6], given[7]
    end
    outcomes[index] = 'pending'
    if given[2] ~= 'failed' then
      Tasks.reopen(ctx, task_id, task, ctx.now)
    elseif Tasks.fail_attempt(ctx, task_id, task, given[3]) then
      outcomes[index] = 'failed'
    end
  else
    outcomes[index] = 'lost'
    Tasks.trash(given[4])
  end
end
Staging.unstage(payloads)
return reply('returned', Run.close(ctx), outcomes)
