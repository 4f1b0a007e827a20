-- Ends a lease of an evaluation's task: with a group, whose payload was stored before, with an error, or unfinished.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, worker_id, instance_id, lease_id, 'group' | 'interrupted' | 'failed', error, payload key (''
--         for none), task_id, samples, head_epoch, head, tail_epoch, tail, bytes}
-- Replies {'ended', revision, 'accepted' | 'duplicate' | 'closed' | 'pending' | 'failed'}
--       | {'error', 'unknown_run' | 'store_rolled_back' | 'unknown_lease' | 'evaluation_result' | 'evaluations_full',
--         ...}: the payload's key is on trash where there is a run
-- Complexity O(log tasks)

-- @include evaluations
-- @include staging

local ctx = Run.context()
local request = unpack_msg(ARGV[1])
local seen, worker_id, instance_id, lease_id, kind, why, payload = unpack(request, 1, 7)
local task_id, samples, head_epoch, head, tail_epoch, tail, bytes = unpack(request, 8, 14)
local payloads = payload ~= '' and {payload} or {}

if payload == '' then
  Run.relieve()
end
local refusal = Run.open(ctx, seen)
if refusal then
  if ctx.state then
    Staging.discard(payloads)
  end
  return refusal
end

local function refuse_it(...)
  Staging.discard(payloads)
  Run.close(ctx)
  return refuse(...)
end

local function answer(outcome)
  if outcome ~= 'accepted' then
    Staging.discard(payloads)
  end
  return reply('ended', Run.close(ctx), outcome)
end

local eval_id, number, index, attempt = Evaluations.parse_lease_id(lease_id)
if not eval_id then
  return refuse_it('unknown_lease', lease_id)
end
local evaluation, task = Evaluations.find_leased(eval_id, number, index)
if not evaluation then
  return answer('closed')
elseif not task or attempt > task.attempt then
  return refuse_it('unknown_lease', lease_id)
end

if kind ~= 'group' then
  if not Evaluations.is_live(ctx, eval_id, evaluation, index, task, attempt, worker_id, instance_id) then
    return answer('closed')
  elseif kind == 'failed' then
    return answer(Evaluations.fail_attempt(ctx, eval_id, evaluation, index, task, why) and 'failed' or 'pending')
  end
  Evaluations.reopen_task(ctx, eval_id, evaluation, index, task, 0)
  Evaluations.save_task(ctx, evaluation, index, task)
  return answer('pending')
end

if task.accepted == attempt then
  return answer('duplicate')
elseif task.state == 'finished' or task.state == 'failed' then
  return answer('closed')
end
local function is_pinned(epoch, version)
  return epoch == evaluation.epoch and version == evaluation.version
end
if task_id ~= task.task_id then
  return refuse_it('evaluation_result', 'group.header.task_id', task_id, task.task_id .. ', the task of the lease')
elseif samples ~= task.group_size then
  local limit = format('%d, the group_size of the task', task.group_size)
  return refuse_it('evaluation_result', 'group.header.samples', format('%d samples', samples), limit)
elseif not is_pinned(head_epoch, head) or not is_pinned(tail_epoch, tail) then
  local found = format('versions %d.%d to %d.%d', head_epoch, head, tail_epoch, tail)
  local limit = format('of version %d.%d alone, which is evaluated', evaluation.epoch, evaluation.version)
  return refuse_it('evaluation_result', 'group.header.samples.spans', found, limit)
end
local stored = tonumber(call('HGET', RUN, 'eval_bytes')) - task.spec_bytes + bytes
if stored > MAX_EVAL_BYTES then
  return refuse_it('evaluations_full', 'stored_bytes', stored, MAX_EVAL_BYTES)
end

Evaluations.end_task(ctx, eval_id, evaluation, index, task, 'finished', bytes)
task.payload, task.accepted = payload, attempt
Evaluations.save_task(ctx, evaluation, index, task)
Evaluations.save(ctx, eval_id, evaluation)
Staging.unstage(payloads)
return answer('accepted')
