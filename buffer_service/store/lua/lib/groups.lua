-- Group records and the queue.
--
-- A group's record is a msgpack array, the same in hash `groups` while it is queued and in the chunks of a step after:
-- see the G_ constants (13 is the environment). Head and tail are those of the present timeline as of G_EPOCH, the
-- run's epoch when the record was written; `clamp` brings them up to date.
--
-- Indexes: `queue` (score: sequence, member: group id) and `queue_heads` (score: head, member: fixed-width sequence and
-- group id, so that equal heads go by sequence).

-- @include tasks
-- @include timeline

local G_ID, G_TASK, G_SEQUENCE, G_PAYLOAD, G_HEAD, G_TAIL, G_EPOCH = 1, 2, 3, 4, 5, 6, 7
local G_SAMPLES, G_TOKENS, G_LOSS_TOKENS, G_BYTES, G_SPANS = 8, 9, 10, 11, 12

local GROUPS, QUEUE, QUEUE_HEADS = key('groups'), key('queue'), key('queue_heads')

local function head_entry(group)
  return format('%015d', group[G_SEQUENCE]) .. group[G_ID]
end

-- Brings head and tail of a record into the present timeline.
local function clamp(group)
  if group[G_EPOCH] ~= state.epoch then
    group[G_HEAD] = effective(group[G_EPOCH], group[G_HEAD])
    group[G_TAIL] = effective(group[G_EPOCH], group[G_TAIL])
    group[G_EPOCH] = state.epoch
  end
  return group
end

local function move_group(group, from, to)
  move_groups(from, to, 1, group[G_SAMPLES], group[G_TOKENS], group[G_BYTES])
end

-- Puts an accepted record into the queue.
local function queue_group(group, from)
  move_group(group, from, 'queued')
  call('HSET', GROUPS, group[G_ID], pack(group))
  call('ZADD', QUEUE, format('%d', group[G_SEQUENCE]), group[G_ID])
  call('ZADD', QUEUE_HEADS, format('%d', group[G_HEAD]), head_entry(group))
  -- Pulls wait only while less than a batch is queued; a hint at every group would wake all replicas for nothing.
  if call('ZCARD', QUEUE) == policy.batch_groups then
    topics.groups = true
  end
end

local function load_group(group_id)
  return clamp(unpack_msg(call('HGET', GROUPS, group_id)))
end

local function unqueue_group(group)
  call('ZREM', QUEUE, group[G_ID])
  call('ZREM', QUEUE_HEADS, head_entry(group))
  call('HDEL', GROUPS, group[G_ID])
  topics.space, topics.tasks = true, true
end

-- A group ends for good, outside of training; its task's tombstone stays until the next checkpoint.
local function end_group(group, from, to)
  move_group(group, from, to)
  trash(group[G_PAYLOAD])
  bury_task(group[G_TASK])
end

-- A group that is no use is replaced by a new generation of its task, where it has one to start.
local function replace_group(group, from, to, otherwise)
  local task = load_task(group[G_TASK])
  if task.leaseless then
    end_group(group, from, otherwise)
  else
    move_group(group, from, to)
    trash(group[G_PAYLOAD])
    regenerate_task(group[G_TASK], task)
  end
end

-- Whether the queue has room for (groups, tokens, bytes) more.
local function fits(groups, tokens, bytes)
  local queued = ledger.groups.queued
  return call('ZCARD', QUEUE) + groups <= policy.max_queued_groups
    and (policy.max_queued_tokens == 0 or queued[3] + tokens <= policy.max_queued_tokens)
    and queued[4] + bytes <= policy.max_queued_bytes
end

-- Drops the oldest queued groups until (groups, tokens, bytes) more fit.
local function drop_oldest_until_fits(groups, tokens, bytes)
  while not fits(groups, tokens, bytes) do
    local oldest = load_group(call('ZRANGE', QUEUE, 0, 0)[1])
    unqueue_group(oldest)
    end_group(oldest, 'queued', 'dropped_overflow')
  end
end
