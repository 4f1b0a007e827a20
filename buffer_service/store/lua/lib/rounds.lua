-- Closing a round of a step.

-- @include batches
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

-- Sums over the groups of each environment in the order of ENVIRONMENT_TOTALS (nothing is accepted here): groups,
-- response tokens, staleness, pre-queue, in-queue (versions), token staleness (thousandths). And what is summed for the
-- run alone.
local function sum_groups(groups, train_version)
  local environments = {}
  local longest_tokens, rewards, turns, truncated_samples, spanning = 0, 0, 0, 0, 0
  for _, group in ipairs(groups) do
    local tokens, longest, reward, turn, truncated = struct.unpack(RESPONSES, group[G_RESPONSES])
    local environment = group[G_ENVIRONMENT]
    local sums = environments[environment]
    if not sums then
      sums = {0, 0, 0, 0, 0, 0, 0}
      environments[environment] = sums
    end
    local head, tail, behind = group[G_HEAD], group[G_TAIL], 1000 * train_version - group[G_MEAN]
    sums[2], sums[3] = sums[2] + 1, sums[3] + tokens
    sums[4] = sums[4] + (train_version > head and train_version - head or 0)
    sums[5] = sums[5] + tail - head
    sums[6] = sums[6] + (train_version > tail and train_version - tail or 0)
    sums[7] = sums[7] + (behind > 0 and tokens * behind or 0)
    longest_tokens, rewards, turns = longest_tokens + longest, rewards + reward, turns + turn
    truncated_samples, spanning = truncated_samples + truncated, spanning + group[G_SPANS]
  end
  return environments, longest_tokens, rewards, turns, truncated_samples, spanning
end

local function count_assembled(groups, own, train_version)
  local environments, longest_tokens, rewards, turns, truncated_samples, spanning = sum_groups(groups, train_version)
  for environment, sums in pairs(environments) do
    local its = environment_totals(environment)
    for place = 2, #ENVIRONMENT_TOTALS do
      its[place] = its[place] + sums[place]
      count_total(ENVIRONMENT_TOTALS[place], sums[place])
    end
  end
  count_total('assembled_samples', own.samples)
  count_total('assembled_longest_tokens', longest_tokens)
  count_total('assembled_reward_milli', rewards)
  count_total('assembled_turns', turns)
  count_total('assembled_truncated_samples', truncated_samples)
  stat('assembled_groups_spanning_versions', spanning)
  ledger.statistics.staleness_max = math.max(ledger.statistics.staleness_max, own.staleness_max)
end

-- A step that is about to get its first round.
local function new_step(train_version, target)
  return {
    train_version = train_version, target = target, micro = policy.micro_batch_groups, budget = policy.batch_tokens,
    equal = policy.equal_shards, rounds = 0, groups = 0, samples = 0, tokens = 0, bytes = 0, environments = {},
  }
end

-- Closes the next round of step `next_step` with groups that were just taken out of the queue, in order of pick; with
-- the step's last round the step is assembled. Returns the round.
local function close_round(header, groups, world_size)
  local step, round = state.next_step, header.rounds
  if is_recorded() then
    local ids = {}
    for index, group in ipairs(groups) do
      ids[index] = group[G_ID]
    end
    record('round', {now, step, round, header.train_version, ids})
  end
  local environments = count_in_step(header, 1, groups)
  sort_groups(groups)
  local own = measure(groups, header.train_version)
  local before = round > 0 and load_round(step, round - 1).total or nil
  local stored = {own = own, total = up_to(before, own)}
  store_round(step, round, stored, split(groups, world_size, header.equal == 1))

  local final = header.micro == 0 or header.groups >= header.target
    or (header.budget > 0 and header.tokens >= header.budget)
  settle_round(header, environments, final)
  count_assembled(groups, own, header.train_version)
  header.rounds = round + 1
  save_step(step, header)
  if final then
    state.next_step, state.rounds = step + 1, 0
  else
    state.rounds = header.rounds
  end
  return stored
end
