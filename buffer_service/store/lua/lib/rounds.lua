-- Closing a round of a step.

-- @include batches
-- @include gathering
-- @include totals

-- Moves the groups of a round, of these sizes, into the step that is forming, or with the whole step to its delivery.
local function settle_round(header, environments, final)
  if header.micro == 0 then
    move_step(header, 'queued', 'delivered')
    return
  end
  move_step({environments = environments}, 'queued', 'forming')
  if final then
    move_step(header, 'forming', 'delivered')
  end
end

-- Adds sums of other groups to these (of sum_groups, in an array).
local function add_sums(sums, others)
  for environment, amounts in pairs(others[1]) do
    sums[1][environment] = add_each(sums[1][environment] or {}, amounts)
  end
  sums[2] = up_to(sums[2], others[2])
  add_each(sums[3], others[3])
  for index, counts in ipairs(others[4]) do
    add_each(sums[4][index], counts)
  end
end

-- Adds the sums of a round's groups (sum_groups) to what the run and its environments are measured by.
local function count_assembled(environments, own, others, by_staleness)
  for environment, sums in pairs(environments) do
    local its = environment_totals(environment)
    for place = 2, #ENVIRONMENT_TOTALS do
      -- Samples, tokens and bytes are in the ledger already.
      local by = sums[place == 2 and 1 or place + 2]
      add_total(its, place, by)
      count_total(ENVIRONMENT_TOTALS[place], by)
    end
  end
  local spanning, longest_tokens, rewards, turns, truncated_samples = unpack(others)
  count_total('assembled_samples', own.samples)
  count_total('assembled_longest_tokens', longest_tokens)
  count_total('assembled_reward_milli', rewards)
  count_total('assembled_turns', turns)
  count_total('assembled_truncated_samples', truncated_samples)
  stat('assembled_groups_spanning_versions', spanning)
  count_staleness(by_staleness)
  ledger.statistics.staleness_max = math.max(ledger.statistics.staleness_max, own.staleness_max)
end

-- A step that is about to get its first round.
local function new_step(train_version, target)
  return {
    train_version = train_version, target = target, micro = policy.micro_batch_groups, budget = policy.batch_tokens,
    equal = policy.equal_shards, rounds = 0, groups = 0, samples = 0, tokens = 0, bytes = 0, environments = {},
  }
end

-- Closes the next round of step `next_step` with what was gathered for it and groups that were just taken out of the
-- queue, in order of pick; with the step's last round the step is assembled. Returns the round.
local function close_round(header, taken, world_size)
  local step, round = state.next_step, header.rounds
  local sums = {sum_groups(taken, header.train_version)}
  local groups, gathered = take_gathered()
  for _, group in ipairs(taken) do
    groups[#groups + 1] = group
  end
  for _, its in ipairs(gathered) do
    add_sums(sums, its)
  end
  local environments, own, others, by_staleness = unpack(sums)
  if is_recorded() then
    local ids = {}
    for index, group in ipairs(groups) do
      ids[index] = group[G_ID]
    end
    record('round', {now, step, round, header.train_version, ids})
  end
  sort_groups(groups)
  count_in_step(header, 1, environments)
  local before = round > 0 and load_round(step, round - 1).total or nil
  local stored = {own = own, total = up_to(before, own)}
  store_round(step, round, stored, split(groups, world_size, header.equal == 1))

  local final = header.micro == 0 or header.groups >= header.target
    or (header.budget > 0 and header.tokens >= header.budget)
  settle_round(header, environments, final)
  count_assembled(environments, own, others, by_staleness)
  header.rounds = round + 1
  save_step(step, header)
  if final then
    state.next_step, state.rounds = step + 1, 0
  else
    state.rounds = header.rounds
  end
  return stored
end
