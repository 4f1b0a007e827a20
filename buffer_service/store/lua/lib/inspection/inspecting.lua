-- What a look at a run sees of single tasks and groups. Scripts that include this write nothing: a page is bounded by
-- what it looks at, in the order of an index that is there anyway.

-- @include batches

local Inspecting = {}

-- Where a group of a task is: '' when its position was not noted, or it may be gathered (Gathering).
function Inspecting.place_of(ctx, task_id, task)
  if task.accepted < 0 then
    return ''
  elseif call('ZSCORE', key('ended'), task_id) then
    return 'ended'
  elseif not task.group then
    return ''
  end
  local member = Blocks.member_of(task.group)
  if call('HEXISTS', Blocks.key_of(Blocks.name_of(member)), member) == 1 then
    return 'queued'
  end
  return ctx.state.gathered and '' or 'in_step'
end

-- A task as lists show it; `not_before` and `expiry` are ms, -1 for none.
function Inspecting.describe_task(ctx, task_id, task, not_before, expiry)
  return {
    task_id, task.sequence, task.state, task.environment, task.priority, task.incarnation, task.attempt, task.failures,
    task.error, task.returned and 1 or 0, task.leaseless and 1 or 0, not_before, expiry, task.worker, task.instance,
    Timeline.effective(ctx, task.lease_term, task.lease_head), task.granted or 0, task.tokens, task.payload,
    task.head >= 0 and Timeline.effective(ctx, task.head_term, task.head) or -1, task.accepted,
    task.filtered and 1 or 0, Inspecting.place_of(ctx, task_id, task), task.body,
  }
end

-- A leased task, by its entry in `leases`.
function Inspecting.describe_lease(ctx, member, expiry)
  local task_id = Tasks.id_of_entry(member)
  return Inspecting.describe_task(ctx, task_id, Tasks.load(task_id), -1, expiry)
end

-- A group as lists show it; micro-batch and rank are -1 in the queue.
function Inspecting.describe_group(group, micro_batch, rank)
  local responses, longest, reward, turns, truncated = struct.unpack(Record.RESPONSES, group[G_RESPONSES])
  return {
    group[G_ID], group[G_TASK], group[G_SEQUENCE], group[G_ENVIRONMENT], group[G_PRIORITY], group[G_SAMPLES],
    group[G_TOKENS], responses, longest, group[G_LOSS_TOKENS], group[G_BYTES], group[G_HEAD], group[G_TAIL],
    group[G_MEAN], reward, turns, truncated, micro_batch, rank,
  }
end

-- Rank of the first entry of a sorted set after (score, sequence), whose members are entries of Tasks: those of
-- equal scores are in order of their sequences. The entry itself may be gone.
function Inspecting.rank_after(at, score, sequence)
  local low = call('ZCOUNT', at, '-inf', format('(%.17g', score))
  local high = call('ZCOUNT', at, '-inf', format('%.17g', score))
  while low < high do
    local middle = floor((low + high) / 2)
    local member = call('ZRANGE', at, middle, middle)[1]
    if tonumber(string.sub(member, 1, 15)) <= sequence then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end
