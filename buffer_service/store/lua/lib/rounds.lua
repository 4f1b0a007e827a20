-- Closing a round of a step.

-- @include batches

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

local function count_assembled(groups, own, train_version)
  local statistics = ledger.statistics
  local pre_queue, in_queue, spanning = 0, 0, 0
  for _, group in ipairs(groups) do
    pre_queue = pre_queue + group[G_TAIL] - group[G_HEAD]
    in_queue = in_queue + math.max(0, train_version - group[G_TAIL])
    spanning = spanning + group[G_SPANS]
  end
  stat('assembled_groups', #groups)
  stat('staleness_sum', own.staleness_sum)
  stat('pre_queue_staleness_sum', pre_queue)
  stat('in_queue_staleness_sum', in_queue)
  stat('assembled_groups_spanning_versions', spanning)
  statistics.staleness_max = math.max(statistics.staleness_max, own.staleness_max)
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
