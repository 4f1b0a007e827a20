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

local request = unpack_msg(ARGV[1])
local seen, worker_id, instance_id, returns = unpack(request, 1, 4)

local payloads = {}
for _, given in ipairs(returns) do
  if given[4] ~= '' then
    payloads[#payloads + 1] = given[4]
  end
end

if #payloads == 0 then
  relieve()
end
local refusal = open_run(seen)
if refusal then
  if state then
    discard_staged(payloads)
  end
  return refusal
end

local outcomes = {}
for index, given in ipairs(returns) do
  local task_id, generation, attempt = parse_lease_id(given[1])
  local task = task_id and load_task(task_id)
  if task and task.worker == worker_id and task.instance == instance_id
    and live_expiry(task_id, task, generation, attempt) then
    stat('leases_returned', 1)
    if given[4] ~= '' then
      trash(task.payload)
      task.payload, task.head_epoch, task.head, task.tokens = given[4], given[5], given[6], given[7]
    end
    outcomes[index] = 'pending'
    if given[2] ~= 'failed' then
      reopen_task(task_id, task, now)
    elseif fail_attempt(task_id, task, given[3]) then
      outcomes[index] = 'failed'
    end
  else
    outcomes[index] = 'lost'
    trash(given[4])
  end
end
unstage(payloads)
return reply('returned', close_run(), outcomes)
