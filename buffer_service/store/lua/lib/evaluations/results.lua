-- Groups that are pushed as results of evaluations. They meet no filter, no cap of the queue and no ledger.

-- @include staging
-- @include tasks

local Results = {}

-- What makes a group no result of the task: {field, value, limit}, or nil.
function Results.check(group, task)
  local term, version = unpack(task.pinned)
  local function is_pinned(of_term, of_version)
    return of_term == term and of_version == version
  end
  if group[P_TASK_ID] ~= task.name then
    return {'task_id', group[P_TASK_ID], task.name .. ', the task of the lease'}
  elseif group[P_INCARNATION] ~= 0 then
    return {'incarnation', format('%d', group[P_INCARNATION]), '0 for the task of an evaluation'}
  end
  local trajectories = group[P_TRAJECTORIES] > 0 and group[P_TRAJECTORIES] or group[P_SAMPLES]
  if trajectories ~= task.group_size then
    local what = trajectories == group[P_SAMPLES] and 'samples' or 'trajectories'
    return {'samples', format('%d %s', trajectories, what), format('%d, the group_size of the task', task.group_size)}
  elseif not is_pinned(group[P_HEAD_TERM], group[P_HEAD]) or not is_pinned(group[P_TAIL_TERM], group[P_TAIL]) then
    local found = format('versions %d.%d to %d.%d', group[P_HEAD_TERM], group[P_HEAD], group[P_TAIL_TERM],
      group[P_TAIL])
    return {'samples.spans.version', found, format('%d.%d alone, which is evaluated', term, version)}
  end
  return nil
end

-- What becomes of a group whose lease is of an evaluation: 'recorded' | 'duplicate' | 'closed' | 'unknown_lease' |
-- an answer of `missing`, or {field, value, limit}, where field 'stored_bytes' means that the run keeps as much of
-- evaluations as it may. And true when this very payload was recorded by an earlier call. `missing`: see push.lua.
function Results.take(ctx, group, missing)
  local payload = group[P_PAYLOAD]
  local task_id, incarnation, attempt = Tasks.parse_lease_id(group[P_LEASE_ID])
  local eval_id, number
  if task_id then
    eval_id, number = Evaluations.parse_task_id(task_id)
  end
  if not eval_id then
    return 'unknown_lease'
  elseif not Evaluations.exists(eval_id, number) then
    return 'closed'
  end
  local task = Tasks.load(task_id)
  if not task or incarnation > 0 or attempt > task.attempt then
    return 'unknown_lease'
  elseif task.body == payload then
    return 'recorded', true
  elseif task.accepted == attempt then
    return 'duplicate'
  elseif task.state == 'completed' or task.state == 'failed' then
    return 'closed'
  end
  local invalid = Results.check(group, task)
  if invalid then
    return invalid
  end
  local stored = Evaluations.stored_with(group[P_SIZE_BYTES] - task.spec_bytes)
  if stored > MAX_EVAL_BYTES then
    return {'stored_bytes', format('%d', stored), format('%d', MAX_EVAL_BYTES)}
  end
  local lacking = missing(group)
  if lacking then
    return lacking
  end
  task.accepted, task.body = attempt, payload
  Tasks.finish(ctx, task_id, task, 'completed', group[P_SIZE_BYTES])
  return 'recorded'
end
