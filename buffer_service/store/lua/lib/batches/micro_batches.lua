-- Closing a micro-batch of a step.

-- @include batches
-- @include gathering
-- @include totals

local MicroBatches = {}

-- The most groups that a step of its own size may have, as domain/liveness.py argues.
function MicroBatches.most_groups(policy)
  local most = policy.micro_batch_groups > 0 and 65536 or math.min(65536, policy.max_queued_groups)
  local uncommitted = policy.prefetch_batches + policy.batches_per_publish
  if policy.max_lookahead >= 0 then
    local batches = (policy.max_lookahead + 1) * policy.batches_per_publish - (uncommitted - 1)
    most = math.min(most, batches * policy.batch_groups)
  end
  if policy.quota_groups > 0 then
    most = math.min(most, floor(policy.quota_groups / (uncommitted + 1)))
  end
  if policy.micro_batch_groups > 0 and (policy.quota_tokens > 0 or policy.quota_bytes > 0) then
    most = math.min(most, policy.batch_groups)
  end
  -- A controller may lower the caps to what batches of N groups need; a commit keeps all groups of a step at once.
  if policy.target_staleness_milli > 0 or Reuse.is_on({policy = policy}) then
    most = math.min(most, policy.batch_groups)
  end
  return most
end

-- With the stale_action wait: the age, in thousandths of a version, below which a group is too stale for the batch
-- after this one; nil with another action. After what makes up for rejected groups comes the next step.
function MicroBatches.last_chance(ctx, header)
  local state, policy = ctx.state, ctx.policy
  if policy.stale_action ~= 'wait' then
    return nil
  end
  local steps = state.next_step + (header.missing and 0 or 1) - state.published_steps
  local following = math.max(header.train_version, state.version + floor(steps / policy.batches_per_publish))
  return 1000 * (following - policy.max_staleness)
end

-- Leased tasks that have their last chance with the step's last micro-batch. Leases that were given before the last
-- resume are not waited for.
function MicroBatches.awaited_heads(ctx, header, size)
  local is_last = header.groups + size >= header.target and not header.missing
  local below = is_last and MicroBatches.last_chance(ctx, header)
  if not below then
    return 0
  end
  local last = header.train_version - ctx.policy.max_staleness
  return call('ZCOUNT', key('lease_heads'), format('%d', last), format('(%d', below / 1000))
end

-- Leased tasks that hold up the first queued group beyond the window of the order `submission`, where fewer than `size`
-- groups are within it, with `gathered` ones. ctx.window: the sequence at which it ends, nil where there is none.
function MicroBatches.awaited_turns(ctx, size, gathered)
  local first = Tasks.turns_are_awaited(ctx) and call('ZRANGE', key('lease_turns'), 0, 0, 'WITHSCORES')[2]
  if not first then
    return 0
  end
  local wide = ctx.policy.order_window_groups
  ctx.window = tonumber(first) + wide
  local within, beyond = Queue.split_by_window(ctx)
  return gathered + within < size and call('ZCOUNT', key('lease_turns'), '-inf', format('%d', beyond - wide)) or 0
end

-- Whether a step that waits for `count` leased tasks has not waited for stale_wait_ms yet. `stale_wait` of the run's
-- hash: {step that waits, since when, how many it waits for, the first, when it did so last}; `late_wait`: the same of
-- a step that lacks groups for rejected ones, beside which the next one may wait.
function MicroBatches.is_patient(ctx, step, header, count, first)
  local field = header.missing and 'late_wait' or 'stale_wait'
  local raw = call('HGET', RUN, field)
  local since = raw and unpack_msg(raw)
  if not since or since[1] ~= step then
    since = {step, ctx.now}
  end
  call('HSET', RUN, field, pack({since[1], since[2], count, first, ctx.now}))
  return ctx.now - since[2] < ctx.policy.stale_wait_ms
end

-- Leased tasks for which a micro-batch of `size` groups has to wait, and the one whose turn is first where they are
-- waited for by turns, else ''. None where they would find no room, or once the step has waited for stale_wait_ms.
function MicroBatches.awaited(ctx, step, header, size, gathered)
  local count, first = MicroBatches.awaited_turns(ctx, size, gathered), ''
  if count > 0 then
    first = Tasks.id_of_entry(call('ZRANGE', key('lease_turns'), 0, 0)[1])
  elseif gathered == 0 then
    count = MicroBatches.awaited_heads(ctx, header, size)
  end
  if count == 0 then
    return 0, ''
  end
  if Groups.leaves_room(ctx) and MicroBatches.is_patient(ctx, step, header, count, first) then
    return count, first
  end
  if first ~= '' then
    ctx.window = nil
  end
  return 0, ''
end

-- Takes `count` groups out of the queue: those that have their last chance first, then by the policy's order.
function MicroBatches.take(ctx, header, count, budget, multiple, least)
  local below = MicroBatches.last_chance(ctx, header)
  if not below then
    return Queue.take(ctx, count, budget, multiple, least)
  end
  local groups, members, blocks = Queue.stalest(ctx, Queue.subqueues_in(ctx, nil), below, count)
  Queue.remove(ctx, groups, members, blocks, 'stalest_first')
  if #groups < count then
    for _, group in ipairs(Queue.take(ctx, count - #groups, false, 1, 0)) do
      groups[#groups + 1] = group
    end
  end
  return groups
end

-- Moves the groups of a micro-batch, of these sizes, into the step that is forming, or with the whole step to its
-- delivery.
function MicroBatches.settle(ctx, header, environments, final)
  call('HDEL', RUN, 'refused')
  if header.micro == 0 then
    Batches.move_step(ctx, header, 'queued', 'delivered')
    return
  end
  Batches.move_step(ctx, {environments = environments}, 'queued', 'forming')
  if final then
    Batches.move_step(ctx, header, 'forming', 'delivered')
  end
end

-- Adds sums of other groups to these (of Batches.sum, in an array).
function MicroBatches.add_sums(sums, others)
  for environment, amounts in pairs(others[1]) do
    sums[1][environment] = Batches.add_each(sums[1][environment] or {}, amounts)
  end
  sums[2] = Batches.up_to(sums[2], others[2])
  Batches.add_each(sums[3], others[3])
  for index, counts in ipairs(others[4]) do
    Batches.add_each(sums[4][index], counts)
  end
end

-- Adds the sums of a micro-batch's groups (Batches.sum) to what the run and its environments are measured by.
function MicroBatches.count_assembled(ctx, environments, own, others, by_staleness)
  local ledger = ctx.ledger
  for environment, sums in pairs(environments) do
    local its = Ledger.environment_totals(ctx, environment)
    for place = 2, #ENVIRONMENT_TOTALS do
      -- Samples, tokens and bytes are in the ledger already.
      local by = sums[place == 2 and 1 or place + 2]
      Totals.add(its, place, by)
      Totals.count(ctx, ENVIRONMENT_TOTALS[place], by)
    end
  end
  local spanning, longest_tokens, rewards, turns, truncated_samples = unpack(others)
  Totals.count(ctx, 'assembled_samples', own.samples)
  Totals.count(ctx, 'assembled_longest_tokens', longest_tokens)
  Totals.count(ctx, 'assembled_reward_milli', rewards)
  Totals.count(ctx, 'assembled_turns', turns)
  Totals.count(ctx, 'assembled_truncated_samples', truncated_samples)
  Run.count(ctx, 'assembled_groups_spanning_versions', spanning)
  Totals.count_staleness(by_staleness)
  ledger.statistics.staleness_max = math.max(ledger.statistics.staleness_max, own.staleness_max)
end

-- A step that is about to get its first micro-batch.
function MicroBatches.new_step(ctx, train_version, target)
  local policy = ctx.policy
  return {
    train_version = train_version, target = target, micro = policy.micro_batch_groups, budget = policy.batch_tokens,
    equal = policy.equal_shards, micro_batches = 0, groups = 0, samples = 0, tokens = 0, bytes = 0, environments = {},
  }
end

-- Splits the groups of a micro-batch over the ranks. Those that make up for rejected ones go where the step has least,
-- as do the first ones beside what it uses again.
function MicroBatches.split(ctx, step, micro_batch, header, stored, groups, world_size)
  local equal = header.equal == 1
  if not (stored.replaces or header.reused and micro_batch == 0) then
    return Sharding.split(groups, world_size, equal)
  end
  for earlier = Batches.first(header), micro_batch - 1 do
    MicroBatches.split_again(ctx, step, earlier, header, Batches.load_micro_batch(step, earlier), world_size)
  end
  return Sharding.split(groups, world_size, equal, Batches.loads(step, header, micro_batch, world_size))
end

-- Splits a closed micro-batch for another number of ranks, if it is.
function MicroBatches.split_again(ctx, step, micro_batch, header, stored, world_size)
  if #stored.ranks ~= world_size then
    local groups = Batches.micro_batch_groups(step, micro_batch, stored)
    local shards = MicroBatches.split(ctx, step, micro_batch, header, stored, groups, world_size)
    Batches.store_micro_batch(ctx, step, micro_batch, stored, shards)
    ctx.changed = true
  end
end

-- Records, counts and stores the next micro-batch of a step with these groups and sums. Returns it.
function MicroBatches.add(ctx, step, header, groups, sums, world_size, replaces)
  local micro_batch = header.micro_batches
  local environments, own, others, by_staleness = unpack(sums)
  if Run.is_recorded(ctx) then
    local ids = {}
    for index, group in ipairs(groups) do
      ids[index] = group[G_ID]
    end
    Run.record(ctx, 'micro_batch', {ctx.now, step, micro_batch, header.train_version, ids})
  end
  Record.sort(groups)
  Batches.count(header, 1, environments)
  local before = micro_batch > Batches.first(header) and Batches.load_micro_batch(step, micro_batch - 1).total or nil
  local total = Batches.up_to(before, own)
  local stored = {own = own, total = total, train_version = header.train_version, replaces = replaces}
  local shards = MicroBatches.split(ctx, step, micro_batch, header, stored, groups, world_size)
  Batches.store_micro_batch(ctx, step, micro_batch, stored, shards)
  MicroBatches.count_assembled(ctx, environments, own, others, by_staleness)
  header.micro_batches = micro_batch + 1
  return stored
end

-- Has a step that is about to get its first micro-batch use groups again, where there are any.
function MicroBatches.reuse(ctx, step, header, world_size)
  local groups = Reuse.draw(ctx, header.target, header.equal == 1, world_size)
  if #groups == 0 then
    return
  end
  if Run.is_recorded(ctx) then
    local ids = {}
    for index, group in ipairs(groups) do
      ids[index] = group[G_ID]
    end
    Run.record(ctx, 'reused', {ctx.now, step, header.train_version, ids})
  end
  Record.sort(groups)
  local _, own = Batches.sum(groups, header.train_version)
  local stored = {own = own, total = own, train_version = header.train_version}
  header.reused = #groups
  Batches.store_micro_batch(ctx, step, Batches.REUSED, stored, Sharding.split(groups, world_size, header.equal == 1))
  Reuse.move(ctx, 'drawn', 'delivered', #groups)
end

-- Closes a micro-batch of a complete step with groups that make up for rejected ones. Returns it.
function MicroBatches.replace(ctx, step, header, groups, world_size)
  local sums = {Batches.sum(groups, header.train_version)}
  local stored = MicroBatches.add(ctx, step, header, groups, sums, world_size, true)
  Batches.move_step(ctx, {environments = sums[1]}, 'queued', 'delivered')
  Batches.miss(ctx, header, -#groups)
  Batches.save_step(step, header)
  return stored
end

-- Closes the next micro-batch of step `next_step` with what was gathered for it and groups that were just taken out of
-- the queue, in order of pick; with the step's last micro-batch the step is assembled. Returns the micro-batch.
function MicroBatches.close(ctx, header, taken, world_size)
  local state = ctx.state
  local step = state.next_step
  if header.micro_batches == 0 then
    MicroBatches.reuse(ctx, step, header, world_size)
  end
  local sums = {Batches.sum(taken, header.train_version)}
  local groups, gathered = Gathering.take(ctx)
  for _, group in ipairs(taken) do
    groups[#groups + 1] = group
  end
  for _, its in ipairs(gathered) do
    MicroBatches.add_sums(sums, its)
  end
  local stored = MicroBatches.add(ctx, step, header, groups, sums, world_size, header.given_back)
  local final = header.micro == 0 or header.groups >= header.target
    or (header.budget > 0 and header.tokens >= header.budget)
  MicroBatches.settle(ctx, header, sums[1], final)
  Batches.save_step(step, header)
  if final then
    state.next_step, state.micro_batches = step + 1, 0
  else
    state.micro_batches = header.micro_batches
  end
  return stored
end
