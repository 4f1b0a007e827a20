-- One rank's try to pull its shard of a micro-batch of a step: returns a stored one, or closes the next one when enough
-- is queued. A complete step has a next one where groups of it were rejected. Evicts what is too stale first, also when
-- no micro-batch results.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, term, step, rank, world_size, train_version (-1: that of the step's earlier micro-batches,
-- else the
--         published one), micro-batch, batch_groups (-1: the policy's), portion, again}; portion: groups that one call
--         takes, or evicts, of these at most EVICTED_AT_ONCE; again: 1 for a later call of the same try, after 'more'
-- Replies {'batch', revision, step, micro-batch, final, train_version, groups, samples, tokens, loss_tokens,
--         trajectories, reused (groups that the step uses again), staleness_sum, staleness_max, shard_tokens, replayed,
--         queued, forks, chunks}; sizes and staleness are those of the step up to this micro-batch;
--         chunks are packed arrays of group records (Record) whose heads and tails are still to be clamped by the forks
--         ({term, version}) after their term
--       | {'short', revision, queued, needed, leased, pending, asked (1 when a worker has ever asked for a lease),
--         awaited, first}; awaited: leased tasks for which the batch waits, since they would be too stale for the next,
--         or since queued groups began too long after them; first: the first of these, else ''
--       | {'more'}: much was evicted, gathered for a large micro-batch, or put back; call again
--       | {'error', 'unknown_run' | 'store_rolled_back' | 'stale_term' | 'world_size_mismatch' | 'replay_gap' |
--         'step_ahead' | 'micro_batch_closed' | 'micro_batch_ahead' | 'run_paused' | 'failure_budget_exceeded' |
--         'train_version' | 'step_train_version' | 'batch_groups' | 'equal_shards' | 'equal_ranks' |
--         'micro_batch_size', ...}
-- Complexity O(subqueues + portion * log queued), and little more than a copy of each group of the micro-batch that it
-- closes; a replay O(subqueues + shard), after a resume with another world size O(groups of the micro-batch)

-- @include micro_batches
-- @include waiting

local ctx = Run.context()
local seen, term, step, rank, world_size, train_version, micro_batch, batch_groups, portion, again =
  unpack(unpack_msg(ARGV[1]), 1, 10)

Run.relieve()
local refusal = Run.open(ctx, seen) or Run.check_term(ctx, term)
if not refusal and ctx.state.resuming then
  refusal = refuse('run_paused', 'resuming')
end
if refusal then
  return refusal
end
local state, policy = ctx.state, ctx.policy
if state.world_size ~= 0 and world_size ~= state.world_size then
  return refuse('world_size_mismatch', world_size, state.world_size)
end
if step < state.checkpointed_steps then
  return refuse('replay_gap', step, state.checkpointed_steps)
end
if step > state.next_step then
  return refuse('step_ahead', step, state.next_step)
end

-- Ends a try that has its answer: earlier calls of it left the revision to this one.
local function end_run()
  ctx.changed = ctx.changed or again == 1
  return Run.close(ctx)
end

local function answer(header, stored, replayed)
  if state.world_size == 0 then
    state.world_size = world_size
    ctx.changed = true
  end
  local chunks, tokens = Batches.rank_chunks(step, micro_batch, stored, rank), stored.ranks[rank + 1][1]
  if header.reused and micro_batch == 0 then
    local beside = Batches.load_micro_batch(step, Batches.REUSED)
    tokens = tokens + beside.ranks[rank + 1][1]
    for _, chunk in ipairs(Batches.rank_chunks(step, Batches.REUSED, beside, rank)) do
      chunks[#chunks + 1] = chunk
    end
  end
  local final = step < state.next_step and micro_batch == header.micro_batches - 1 and not header.missing
  local total = stored.total
  return reply('batch', end_run(), step, micro_batch, final and 1 or 0, header.train_version, total.groups,
    total.samples, total.tokens, total.loss_tokens, Batches.trajectories(total), header.reused or 0,
    total.staleness_sum, total.staleness_max, tokens, replayed, Queue.count(ctx), state.forks, chunks)
end

local is_open = step == state.next_step and state.micro_batches > 0
local header = (is_open or step < state.next_step) and Batches.load_step(step) or nil
local closed = header and header.micro_batches or 0
if micro_batch < closed then
  local stored = Batches.load_micro_batch(step, micro_batch)
  -- A new term may pull with another number of ranks.
  MicroBatches.split_again(ctx, step, micro_batch, header, stored, world_size)
  return answer(header, stored, 1)
elseif step < state.next_step and not (header and header.missing) then
  return refuse('micro_batch_closed', micro_batch, closed, step)
elseif micro_batch > closed then
  return refuse('micro_batch_ahead', micro_batch, closed, step)
end

refusal = Run.check_paused(ctx)
if refusal then
  return refusal
end
-- Answers of a pull that has to take groups, and what they share.
local Next = {}

function Next.go_on()
  Run.close(ctx, true)
  return reply('more')
end

-- Whoever began to gather the micro-batch has decided what it is, as if the micro-batch were closed.
local its_version, its_groups
if state.gathered and step == state.next_step then
  local its_world_size
  its_version, its_groups, its_world_size = Gathering.terms()
  if not its_version or not is_open and its_version < state.version then
    Gathering.give_back(ctx)
    return Next.go_on()
  elseif its_world_size ~= world_size then
    return refuse('world_size_mismatch', world_size, its_world_size)
  end
end
if header then
  if train_version ~= -1 and train_version ~= header.train_version then
    return refuse('step_train_version', train_version, header.train_version)
  end
else
  if train_version == -1 then
    train_version = state.version
  elseif train_version < state.version then
    return refuse('train_version', train_version, state.version)
  end
  local most = MicroBatches.most_groups(policy)
  if batch_groups == -1 then
    batch_groups = policy.batch_groups
  elseif batch_groups < 1 or batch_groups > most then
    return refuse('batch_groups', batch_groups, most)
  end
  train_version, batch_groups = its_version or train_version, its_groups or batch_groups
  header = MicroBatches.new_step(ctx, train_version, batch_groups)
end
train_version = header.train_version

-- Evicts some of the queued groups that are too stale, stalest first, then of those that might be used again; returns
-- whether more may be left.
function Next.evict()
  local most = math.min(portion, EVICTED_AT_ONCE)
  if policy.max_staleness < 0 then
    return Reuse.evict_stale(ctx, train_version, most) == most
  end
  local stale, members, blocks = Queue.stalest(ctx, Queue.load_subqueues(ctx),
    1000 * (train_version - policy.max_staleness), most)
  Queue.remove(ctx, stale, members, blocks, 'stalest_first')
  for _, group in ipairs(stale) do
    if policy.stale_action == 'recycle' or policy.stale_action == 'wait' then
      Groups.replace(ctx, group, 'queued', 'recycled', 'dropped_stale')
    elseif policy.stale_action == 'drop' then
      Groups.finish(ctx, group, 'queued', 'dropped_stale')
    else
      error('unknown stale_action ' .. policy.stale_action)
    end
  end
  return #stale == most or Reuse.evict_stale(ctx, train_version, most) == most
end

-- The pull's answer while too little is queued, or the batch waits for groups in flight.
function Next.short(queued, size, wanted, awaited, first)
  local leased = call('ZCARD', key('leases'))
  if state.draining and leased == 0 and ctx.staged == 0 and not Waiting.head(ctx) then
    end_run()
    return refuse('run_paused', 'drained')
  end
  Run.want_groups(ctx, wanted)
  return reply('short', end_run(), queued, size, leased, Pending.count(ctx), call('HEXISTS', RUN, 'asked'),
    awaited, first)
end

-- Closes a micro-batch of a complete step that lacks groups for rejected ones. It is taken at once, never gathered.
function Next.replacement()
  local size = math.min(header.missing, TAKEN_AT_ONCE, policy.max_queued_groups)
  if header.micro > 0 then
    size = math.min(size, world_size * header.micro)
  end
  if Next.evict() then
    return Next.go_on()
  end
  local queued, gathered = Queue.count(ctx), state.gathered and state.gathered[GATHERED_GROUPS] or 0
  if queued >= size and queued - gathered < size then
    Gathering.give_back(ctx)
    return Next.go_on()
  end
  local awaited, first = 0, ''
  if queued >= size then
    awaited, first = MicroBatches.awaited(ctx, step, header, size, 0)
  end
  if queued < size or awaited > 0 then
    return Next.short(queued, size, size, awaited, first)
  end
  local groups = MicroBatches.take(ctx, header, size, false, 1, 0)
  return answer(header, MicroBatches.replace(ctx, step, header, groups, world_size), 0)
end

-- Closes the next micro-batch, or gathers a portion of it, if enough is queued for it.
function Next.micro_batch()
  -- How many groups the micro-batch takes: at most `size`, in a multiple of `multiple`.
  local is_streamed, is_equal = header.micro > 0, header.equal == 1
  if is_equal and (is_streamed or header.budget == 0) and header.target % world_size ~= 0 then
    return refuse('equal_shards', world_size, header.target)
  end
  if is_equal and not is_streamed and header.target < world_size then
    return refuse('equal_ranks', world_size, header.target)
  end
  local size, budget, multiple = header.target, header.budget, is_equal and world_size or 1
  if is_streamed then
    size, budget, multiple = math.min(world_size * header.micro, header.target - header.groups), 0, 1
    if size > policy.max_queued_groups then
      return refuse('micro_batch_size', world_size, floor(policy.max_queued_groups / header.micro))
    end
  end

  if Next.evict() then
    return Next.go_on()
  end

  local gathered, gathered_tokens = 0, 0
  if state.gathered then
    gathered, gathered_tokens = state.gathered[GATHERED_GROUPS], state.gathered[GATHERED_TOKENS]
  end
  local queued = Queue.count(ctx)
  local is_enough = queued >= size or (budget > 0 and Queue.tokens(ctx) >= budget)
  local awaited, first = 0, ''
  if is_enough then
    awaited, first = MicroBatches.awaited(ctx, step, header, size, gathered)
  end
  if is_enough and queued >= multiple and awaited == 0 then
    local count = math.min(size - gathered, math.ceil(portion / multiple) * multiple)
    local is_last = gathered + count == size
    local stride = not is_last and call('HGET', RUN, 'queue_stride') or ''
    local topics = ctx.topics
    local space, tasks = topics.space, topics.tasks
    local least = gathered == 0 and multiple or 0
    local left = budget > 0 and budget - gathered_tokens
    local groups = MicroBatches.take(ctx, header, count, left, multiple, least)
    if #groups == count and not is_last then
      local sums = {Batches.sum(groups, train_version)}
      Gathering.keep(ctx, {train_version, batch_groups, world_size}, stride, groups, sums)
      -- They leave room when the micro-batch is closed.
      topics.space, topics.tasks = space, tasks
      return Next.go_on()
    end
    return answer(header, MicroBatches.close(ctx, header, groups, world_size), 0)
  elseif gathered > 0 then
    -- Some of what was queued was dropped meanwhile: a pull that waits holds nothing.
    Gathering.give_back(ctx)
    return Next.go_on()
  end

  -- With enough tokens it waits for a group for each rank.
  return Next.short(queued, size, is_enough and multiple or size, awaited, first)
end

return step < state.next_step and Next.replacement() or Next.micro_batch()
