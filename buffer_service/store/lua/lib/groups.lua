-- What becomes of single groups: records (lib/record.lua), the queue's indexes (lib/queue.lua), the ledgers, the
-- payload and the task, all moved together.

-- @include tasks
-- @include queue

local function move_group(group, from, to)
  move_groups(from, to, group[G_ENVIRONMENT], 1, group[G_SAMPLES], group[G_TOKENS], group[G_BYTES])
end

-- Records that an accepted group went to another state.
local function record_moved(group, to)
  if is_recorded() then
    record('moved', {now, group[G_ID], to})
  end
end

-- Puts a record of the present timeline into the queue.
local function queue_group(group, from)
  local budget, tokens = policy.batch_tokens, ledger.groups.queued[3]
  move_group(group, from, 'queued')
  index_group(group)
  if from ~= 'new' then
    record_moved(group, 'queued')
  end
  -- Pulls wait only while too little is queued; a hint at every group would wake all replicas for nothing.
  if queued_count() == wanted or tokens < budget and tokens + group[G_TOKENS] >= budget then
    topics.groups = true
  end
end

-- A group ends for good, outside of training; its task's tombstone stays until the next checkpoint.
local function end_group(group, from, to)
  move_group(group, from, to)
  record_moved(group, to)
  trash(group[G_PAYLOAD])
  bury_task(group[G_TASK])
end

-- A group that is no use is replaced by a new generation of its task, where it has one to start. What is recycled may
-- have run out of generations; what was lost never does.
local function replace_group(group, from, to, otherwise)
  local task = load_task(group[G_TASK])
  local is_last = to == 'recycled' and policy.max_generations > 0 and task.generation + 1 >= policy.max_generations
  if task.leaseless or is_last then
    end_group(group, from, otherwise)
  else
    move_group(group, from, to)
    record_moved(group, to)
    trash(group[G_PAYLOAD])
    regenerate_task(group[G_TASK], task)
  end
end

-- Whether the queue has room for (groups, tokens, bytes) more under its caps.
local function fits_queue(groups, tokens, bytes)
  local queued = ledger.groups.queued
  return queued_count() + groups <= policy.max_queued_groups
    and (policy.max_queued_tokens == 0 or queued[3] + tokens <= policy.max_queued_tokens)
    and queued[4] + bytes <= policy.max_queued_bytes
end

-- Whether the run's quotas have room for them: they count what is queued, forming and delivered.
local function fits_quotas(groups, tokens, bytes)
  if not quotas_set() then
    return true
  end
  local amounts = ledger.groups
  local function within(quota, index, more)
    local live = amounts.queued[index] + amounts.forming[index] + amounts.delivered[index]
    return quota == 0 or live + more <= quota
  end
  return within(policy.quota_groups, 1, groups) and within(policy.quota_tokens, 3, tokens)
    and within(policy.quota_bytes, 4, bytes)
end

local function fits(groups, tokens, bytes)
  return fits_queue(groups, tokens, bytes) and fits_quotas(groups, tokens, bytes)
end

-- Drops the oldest queued group; false when there is none.
local function drop_oldest()
  local group, member = oldest_queued()
  if not group then
    return false
  end
  unindex_groups({group}, {member}, blocks_of({member}), 'fifo')
  end_group(group, 'queued', 'dropped_overflow')
  return true
end
