-- What becomes of single groups: records (Record), the queue's indexes (Queue), the ledgers, the
-- payload and the task, all moved together.

-- @include tasks
-- @include queue
-- @include reuse
-- @include waiting

local Groups = {}

function Groups.move(ctx, group, from, to)
  Ledger.move_groups(ctx, from, to, group[G_ENVIRONMENT], 1, group[G_SAMPLES], group[G_TOKENS], group[G_BYTES])
end

-- Records that an accepted group went to another state, and why where a trainer says so.
function Groups.record_moved(ctx, group, to, why)
  if Run.is_recorded(ctx) then
    Run.record(ctx, 'moved', {ctx.now, group[G_ID], to, why})
  end
end

-- The first stage of the policy that has not added anything to a group; nil for none.
function Groups.following_stage(ctx, group)
  local done = {}
  for _, added in ipairs(group[G_ADDED] or {}) do
    done[added[1]] = true
  end
  for _, name in ipairs(ctx.policy.stages) do
    if not done[name] then
      return name
    end
  end
  return nil
end

-- Has a group that is being accepted begin with the first stage; false where the policy names none.
function Groups.begin_stages(ctx, group)
  local first = ctx.policy.stages[1]
  if not first then
    return false
  end
  group[G_STAGE], group[G_TRIES], group[G_ADDED] = first, 0, {}
  ctx.topics.stages = true
  return true
end

-- Puts a record of the present timeline into the queue: one that is accepted into the first stage of the policy.
function Groups.queue(ctx, group, from)
  local tokens = Queue.tokens(ctx)
  Groups.move(ctx, group, from, 'queued')
  if from == 'new' and Groups.begin_stages(ctx, group) then
    return Queue.add(ctx, group)
  end
  Queue.add(ctx, group)
  if from ~= 'new' then
    Groups.record_moved(ctx, group, 'queued')
  end
  Groups.hint(ctx, tokens, group)
end

-- A group may be taken by batches now; `before`: tokens that they could take before.
function Groups.hint(ctx, before, group)
  local budget = ctx.policy.batch_tokens
  -- Pulls wait only while too little is queued; a hint at every group would wake all replicas for nothing. Only while a
  -- step lacks groups, beside which the next one may be waited for, each of the two may need it.
  if Queue.count(ctx) == ctx.wanted or ctx.state.missing or before < budget and before + group[G_TOKENS] >= budget then
    ctx.topics.groups = true
  end
end

-- A group that ends needs its payloads no more. A later step that uses it again may.
function Groups.trash(ctx, group)
  if not Reuse.give_up(ctx, group, true) then
    call_many('SADD', key('trash'), Record.payloads(group))
  end
end

-- A group ends for good, outside of training; its task's tombstone stays until the next checkpoint.
function Groups.finish(ctx, group, from, to, why)
  Groups.move(ctx, group, from, to)
  Groups.record_moved(ctx, group, to, why)
  Groups.trash(ctx, group)
  Tasks.bury(ctx, group[G_TASK])
end

-- A group that is no use is replaced by a new incarnation of its task, where it has one to start. What is recycled may
-- have run out of incarnations; what was lost never does.
function Groups.replace(ctx, group, from, to, otherwise)
  local policy = ctx.policy
  local task = Tasks.load(group[G_TASK])
  local is_last = to == 'recycled' and policy.max_incarnations > 0 and task.incarnation + 1 >= policy.max_incarnations
  if task.leaseless or is_last then
    Groups.finish(ctx, group, from, otherwise)
  else
    Groups.move(ctx, group, from, to)
    Groups.record_moved(ctx, group, to)
    Groups.trash(ctx, group)
    Tasks.regenerate(ctx, group[G_TASK], task)
  end
end

-- Whether the queue has room for (groups, tokens, bytes) more under its caps.
function Groups.fits_queue(ctx, groups, tokens, bytes)
  local policy = ctx.policy
  local queued = ctx.ledger.groups.queued
  return Queue.total(ctx) + groups <= policy.max_queued_groups
    and (policy.max_queued_tokens == 0 or queued[A_TOKENS] + tokens <= policy.max_queued_tokens)
    and queued[A_BYTES] + bytes <= policy.max_queued_bytes
end

-- Whether the run's quotas have room for them: they count what is queued, forming and delivered.
function Groups.fits_quotas(ctx, groups, tokens, bytes)
  local policy = ctx.policy
  if not Ledger.quotas_set(ctx) then
    return true
  end
  local amounts = ctx.ledger.groups
  local function within(quota, index, more)
    local live = amounts.queued[index] + amounts.forming[index] + amounts.delivered[index]
    return quota == 0 or live + more <= quota
  end
  return within(policy.quota_groups, 1, groups) and within(policy.quota_tokens, 3, tokens)
    and within(policy.quota_bytes, 4, bytes)
end

function Groups.fits(ctx, groups, tokens, bytes)
  return Groups.fits_queue(ctx, groups, tokens, bytes) and Groups.fits_quotas(ctx, groups, tokens, bytes)
end

-- The subqueues of which a push may drop groups. While any are in stages those that wait there make room first, and of
-- those that batches may take only what is beyond what the next one needs: it would never be complete. What workers of
-- stages hold is left to them.
function Groups.droppable(ctx)
  local all = Queue.load_subqueues(ctx)
  Queue.count(ctx)
  if ctx.staged == 0 then
    return all
  end
  local waiting = {}
  for _, subqueue in ipairs(all) do
    if subqueue.count > 0 and subqueue.stage and string.sub(subqueue.stage, -1) ~= '*' then
      waiting[#waiting + 1] = subqueue
    end
  end
  if #waiting > 0 then
    return waiting
  end
  return Queue.count(ctx) >= ctx.wanted and Queue.subqueues_in(ctx, nil) or {}
end

-- Drops the oldest group of subqueues; false when there is none.
function Groups.drop_oldest(ctx, subqueues)
  local group, member = Queue.oldest(ctx, subqueues)
  if not group then
    return false
  end
  Queue.remove(ctx, {group}, {member}, Blocks.of({member}), 'fifo')
  Groups.finish(ctx, group, 'queued', 'dropped_overflow')
  return true
end

-- Overflow actions that make room, with what drops a group of subqueues; it returns false when there is none.
Groups.DROPS = {
  drop_oldest = Groups.drop_oldest,
}

-- Whether pushed groups make room by dropping others.
function Groups.makes_room(ctx)
  return Groups.DROPS[ctx.policy.overflow_action] ~= nil
end

-- Drops a group in favour of a pushed one; false when there is none to drop.
function Groups.drop_one(ctx)
  return Groups.DROPS[ctx.policy.overflow_action](ctx, Groups.droppable(ctx))
end

-- Notes the size of a leased group that was refused for want of room, until a batch makes some. It has to come again.
function Groups.note_refused(ctx, tokens, bytes)
  if Tasks.are_awaited(ctx) then
    call('HSET', RUN, 'refused', pack({tokens, bytes}))
    ctx.took_room = true
  end
end

-- Whether a group in flight would find room. Without it the group waits for the batch that would wait for it: admission
-- leaves room for all that it lets begin, and late pushes and those without leases come beside that.
function Groups.leaves_room(ctx)
  if Groups.makes_room(ctx) then
    return true
  elseif Waiting.head(ctx) then
    return false
  end
  local raw = call('HGET', RUN, 'refused')
  local refused = raw and unpack_msg(raw) or {1, 1}
  return Groups.fits(ctx, 1, refused[1], refused[2])
end
