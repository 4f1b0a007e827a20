-- Returns leases, with what their attempts leave behind. Partial rollouts are stored before; those of lost leases and
-- of pinned tasks go to trash.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, worker_id, instance_id, returns}; a return is {lease_id, 'interrupted' | 'failed', error,
--         payload key of the partial rollout ('' for none), head_term, head (-1: none), tokens}
-- Replies {'returned', revision, outcomes}: 'pending' | 'failed' | 'lost' for each, in request order
--       | {'error', 'unknown_run' | 'store_rolled_back', ...}: the partial rollouts' keys are on trash where there is a
--         run
-- Complexity O(returns * log tasks)

-- @include tasks
-- @include staging
-- @include stages

local ctx = Run.context()
local seen, worker_id, instance_id, returns = unpack(unpack_msg(ARGV[1]), 1, 4)

local payloads = {}
for _, given in ipairs(returns) do
  local _, how, _, payload = unpack(given, 1, 4)
  if how ~= 'interrupted' and how ~= 'failed' then
    error('unknown kind of return: ' .. how)
  end
  if payload ~= '' then
    payloads[#payloads + 1] = payload
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

for _, payload in ipairs(payloads) do
  Run.mark_parts(payload)
end
local outcomes = {}
-- Takes the lease of a group in a stage back.
local function take_back_stage(lease_id, how)
  local task_id = Stages.parse(lease_id)
  local member, held = Stages.find(task_id and Tasks.load(task_id), lease_id, worker_id, instance_id)
  if not member or not Stages.live_expiry(ctx, member) then
    return 'lost'
  end
  return Stages.give_up(ctx, member, held, how == 'failed') and 'failed' or 'pending'
end

for index, given in ipairs(returns) do
  local lease_id, how, why, payload, head_term, head, tokens = unpack(given, 1, 7)
  local task_id, incarnation, attempt = Tasks.parse_lease_id(lease_id)
  local task = task_id and Tasks.load(task_id)
  if task and task.worker == worker_id and task.instance == instance_id
    and Tasks.live_expiry(ctx, task_id, task, incarnation, attempt) then
    Tasks.count(ctx, task, 'leases_returned')
    if task.evaluation then
      Tasks.trash(payload)
    elseif payload ~= '' then
      Tasks.trash(task.payload)
      task.payload, task.head_term, task.head, task.tokens = payload, head_term, head, tokens
    end
    outcomes[index] = 'pending'
    if how == 'interrupted' then
      Tasks.reopen(ctx, task_id, task, ctx.now)
    elseif Tasks.fail_attempt(ctx, task_id, task, why) then
      outcomes[index] = 'failed'
    end
  else
    outcomes[index] = Stages.has_lease(lease_id) and take_back_stage(lease_id, how) or 'lost'
    Tasks.trash(payload)
  end
end
Staging.unstage(payloads)
return reply('returned', Run.close(ctx), outcomes)
