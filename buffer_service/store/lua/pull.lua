-- One rank's try to pull its shard of a step: replays a stored one, or assembles the next one when enough is queued.
-- Evicts what is too stale first, also when no batch results.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, epoch, step, rank, world_size, train_version (-1: the published one), again}; again: 1 for a
--         later call of the same try, after 'more'
-- Replies {'batch', revision, step, train_version, groups, samples, tokens, loss_tokens, staleness_sum, staleness_max,
--         shard_tokens, replayed, queued, forks, chunks}; chunks are packed arrays of group records (lib/groups.lua)
--         whose
--         heads and tails are still to be clamped by the forks ({epoch, version}) after their epoch
--       | {'short', revision, queued, needed, leased, pending, asked (1 when a worker has ever asked for a lease)}
--       | {'more'}: much was evicted; call again
--       | {'error', 'unknown_run' | 'store_rolled_back' | 'stale_epoch' | 'world_size_mismatch' | 'replay_gap' |
--         'step_ahead'
--         | 'run_paused' | 'failure_budget_exceeded' | 'train_version', ...}
-- Complexity O(evicted * log queued + batch_groups * log batch_groups); a replay O(shard)

-- @include batches

local request = unpack_msg(ARGV[1])
local seen, epoch, step, rank, world_size, train_version = unpack(request, 1, 6)
local again = request[7] == 1

relieve()
local refusal = open_run(seen) or check_epoch(epoch)
if refusal then
  return refusal
end
if state.world_size ~= 0 and world_size ~= state.world_size then
  return refuse('world_size_mismatch', world_size, state.world_size)
end
if step < state.checkpointed_steps then
  return refuse('replay_gap', step, state.checkpointed_steps)
end
if step > state.next_step then
  return refuse('step_ahead', step, state.next_step)
end

local function answer(header, replayed)
  if state.world_size == 0 then
    state.world_size = world_size
    changed = true
  end
  local chunks = rank_chunks(step, header, rank)
  return reply('batch', close_run(again), step, header.train_version, header.groups, header.samples, header.tokens,
    header.loss_tokens, header.staleness_sum, header.staleness_max, header.ranks[rank + 1][1], replayed,
    call('ZCARD', QUEUE), state.forks, chunks)
end

if step < state.next_step then
  local header = load_step(step)
  if header.world_size ~= world_size then
    -- A new epoch pulls with another number of ranks.
    local groups = step_groups(step, header)
    delete_chunks(step, header)
    store_shards(step, header, split(groups, world_size))
    changed = true
  end
  return answer(header, 1)
end

if state.paused == 'failure_budget_exceeded' then
  return refuse('failure_budget_exceeded', ledger.tasks.failed, policy.failure_budget, state.last_error)
elseif state.paused ~= '' then
  return refuse('run_paused', state.paused)
end
if train_version == -1 then
  train_version = state.version
elseif train_version < state.version then
  return refuse('train_version', train_version, state.version)
end

-- Evicts up to 1000 queued groups that are too stale, stalest first; returns whether more may be left.
local function evict()
  if policy.max_staleness < 0 then
    return false
  end
  local oldest_fresh = format('(%d', train_version - policy.max_staleness)
  local members = call('ZRANGEBYSCORE', QUEUE_HEADS, '-inf', oldest_fresh, 'LIMIT', 0, 1000)
  for _, member in ipairs(members) do
    local group = load_group(entry_task_id(member))
    unqueue_group(group)
    if policy.stale_action == 'recycle' then
      replace_group(group, 'queued', 'recycled', 'dropped_stale')
    else
      end_group(group, 'queued', 'dropped_stale')
    end
  end
  return #members == 1000
end

if evict() then
  close_run(again)
  return reply('more')
end

local needed = policy.batch_groups
local queued = call('ZCARD', QUEUE)
if queued < needed then
  local asked = call('HEXISTS', RUN, 'asked')
  local pending = call('ZCARD', PENDING) + call('ZCARD', DELAYED)
  return reply('short', close_run(again), queued, needed, call('ZCARD', LEASES), pending, asked)
end

local ids = call('ZRANGE', QUEUE, 0, needed - 1)
local groups, heads = {}, {}
for first = 1, needed, 1000 do
  for _, raw in ipairs(call('HMGET', GROUPS, unpack(ids, first, math.min(first + 999, needed)))) do
    local group = clamp(unpack_msg(raw))
    groups[#groups + 1] = group
    heads[#groups] = head_entry(group)
  end
end
call_many('ZREM', QUEUE, ids)
call_many('ZREM', QUEUE_HEADS, heads)
call_many('HDEL', GROUPS, ids)

local header = {train_version = train_version}
measure(header, groups)
store_shards(step, header, split(groups, world_size))
move_step(header, 'queued', 'delivered')
state.next_step = state.next_step + 1
state.assembled_now = state.assembled_now + needed

local statistics = ledger.statistics
stat('assembled_groups', needed)
stat('staleness_sum', header.staleness_sum)
statistics.staleness_max = math.max(statistics.staleness_max, header.staleness_max)
for _, group in ipairs(groups) do
  stat('pre_queue_staleness_sum', group[G_TAIL] - group[G_HEAD])
  stat('in_queue_staleness_sum', math.max(0, train_version - group[G_TAIL]))
  stat('assembled_groups_spanning_versions', group[G_SPANS])
end
topics.space, topics.tasks = true, true
return answer(header, 0)
