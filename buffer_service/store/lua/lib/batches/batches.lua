-- Assembled steps and the micro-batches that they are made of. A whole batch is a step of one micro-batch; a step that
-- is still open (streaming) is `next_step`, with state.micro_batches > 0 micro-batches closed.
--
-- What a step uses again (Reuse) is a micro-batch before all others, Batches.REUSED: it counts in their totals, but in
-- none of the header's sizes.
--
-- hash `steps`, step → header (msgpack map): train_version, target, micro (0: whole), budget (tokens), equal (1 or
-- 0), micro-batches (closed), given_back (true once a group was rejected or lost while it was open, else absent),
-- missing (groups that a complete step is still to get for rejected ones, absent for none; state.missing is the sum
-- over steps that are not committed), reused (groups that it uses again, absent where it has no such micro-batch), and
-- of the groups that it has now: groups, samples, tokens, bytes, environments
-- ({environment = {groups, samples, tokens, bytes}}). Whether they are forming, delivered or trained follows from
-- next_step and committed_steps. hash `micro_batches`, "step/micro-batch" → msgpack map: own and total (of this
-- micro-batch, and of the step up to it: groups, samples, further_rows (samples beyond trajectories), tokens,
-- loss_tokens, bytes, staleness_sum, staleness_max), train_version (as of closing; absent before), replaces (true
-- where it makes up for what was given back or lost, else absent), and ranks: for each {tokens, chunks}. hash
-- `rejected`, step → msgpack array of the ids of its groups that were rejected. hash `chunks`,
-- "step/micro-batch/rank/index" (from 0) → msgpack array of group records in order of sequence, at most CHUNK of them:
-- what one rank pulls is returned without being unpacked, and freed in portions.

-- @include groups
-- @include sharding

local Batches = {}

Batches.CHUNK = 256
Batches.REUSED = -1

-- The first micro-batch of a step.
function Batches.first(header)
  return header.reused and Batches.REUSED or 0
end

function Batches.is_empty(header)
  return header.micro_batches == 0 and not header.reused
end

function Batches.load_step(step)
  local raw = call('HGET', key('steps'), format('%d', step))
  return raw and unpack_msg(raw) or nil
end

function Batches.save_step(step, header)
  call('HSET', key('steps'), format('%d', step), pack(header))
end

function Batches.delete_step(step)
  call('HDEL', key('steps'), format('%d', step))
  call('HDEL', key('rejected'), format('%d', step))
end

-- Changes how many groups a complete step is still to get; the header is the caller's to write. When none is missing
-- any more, whoever waits for the next step says anew what it wants.
function Batches.miss(ctx, header, by)
  local state, missing = ctx.state, (header.missing or 0) + by
  local all = (state.missing or 0) + by
  if state.missing and all == 0 then
    ctx.topics.groups = true
  end
  header.missing, state.missing = missing > 0 and missing or nil, all > 0 and all or nil
  ctx.changed = true
end

function Batches.micro_batch_field(step, micro_batch)
  return format('%d/%d', step, micro_batch)
end

function Batches.load_micro_batch(step, micro_batch)
  return unpack_msg(call('HGET', key('micro_batches'), Batches.micro_batch_field(step, micro_batch)))
end

function Batches.save_micro_batch(step, micro_batch, stored)
  call('HSET', key('micro_batches'), Batches.micro_batch_field(step, micro_batch), pack(stored))
end

function Batches.chunk_field(step, micro_batch, rank, index)
  return format('%d/%d/%d/%d', step, micro_batch, rank, index)
end

-- State of a step's groups in the ledger.
function Batches.step_state(ctx, step)
  local state = ctx.state
  if step < state.committed_steps then
    return 'trained'
  end
  return step < state.next_step and 'delivered' or 'forming'
end

-- Moves all groups of a step in the ledgers.
function Batches.move_step(ctx, header, from, to)
  Ledger.load_amounts(ctx, header.environments)
  for environment, amount in pairs(header.environments) do
    Ledger.move_groups(ctx, from, to, environment, unpack(amount, A_GROUPS, A_BYTES))
  end
end

-- Sums over groups by environment, each {groups, samples, tokens, bytes, response tokens, staleness, pre-queue,
-- in-queue, token staleness}: staleness as of training by train_version, that of tokens in thousandths. And over all
-- groups: `own` of a micro-batch, sums that no environment has, and groups by staleness, pre-queue and in-queue, and
-- response tokens by staleness, {versions = count} each. Little is done for a group: pulls spend their time here.
function Batches.sum(groups, train_version)
  local by_environment, environments = {}, {}
  for index = 1, #groups do
    local environment = groups[index][G_ENVIRONMENT]
    local its = by_environment[environment]
    if not its then
      its = {}
      by_environment[environment] = its
    end
    its[#its + 1] = groups[index]
  end
  local own = {groups = #groups, samples = 0, further_rows = 0, tokens = 0, loss_tokens = 0, bytes = 0,
    staleness_sum = 0, staleness_max = 0}
  -- Groups of one version by it; of the others by staleness; response tokens by staleness, and in thousandths.
  local by_version, by_total, by_pre_queue, by_in_queue, by_token, tokens_behind = {}, {}, {}, {}, {}, {}
  local loss_tokens, most, spanning, longest_tokens, rewards, turns, truncated_samples = 0, 0, 0, 0, 0, 0, 0
  for environment, its in pairs(by_environment) do
    local samples, tokens, bytes, responses = 0, 0, 0, 0
    local staleness, pre_queue, in_queue, token_staleness = 0, 0, 0, 0
    for index = 1, #its do
      local group = its[index]
      local responses_of = group[G_RESPONSES]
      local response, longest, reward, turn, truncated, place = struct.unpack(Record.RESPONSES, responses_of)
      local head, tail, behind = group[G_HEAD], group[G_TAIL], 1000 * train_version - group[G_MEAN]
      local total, before, waited = train_version - head, tail - head, train_version - tail
      samples, tokens, bytes = samples + group[G_SAMPLES], tokens + group[G_TOKENS], bytes + group[G_BYTES]
      loss_tokens, spanning = loss_tokens + group[G_LOSS_TOKENS], spanning + group[G_SPANS]
      responses, longest_tokens, rewards = responses + response, longest_tokens + longest, rewards + reward
      turns, truncated_samples = turns + turn, truncated_samples + truncated
      pre_queue = pre_queue + before
      if total > 0 then
        staleness = staleness + total
        if total > most then
          most = total
        end
      end
      if waited > 0 then
        in_queue = in_queue + waited
      end
      if behind > 0 then
        token_staleness = token_staleness + response * behind
      end
      if before == 0 then
        by_version[tail] = (by_version[tail] or 0) + 1
      else
        by_total[total] = (by_total[total] or 0) + 1
        by_pre_queue[before] = (by_pre_queue[before] or 0) + 1
        by_in_queue[waited] = (by_in_queue[waited] or 0) + 1
      end
      if place <= #responses_of then
        local version, further, behind_it = struct.unpack(Record.VERSION_TOKENS, responses_of, place)
        if version == Record.NO_VERSION then
          own.further_rows, place = own.further_rows + further, behind_it
        end
      end
      if place > #responses_of then
        tokens_behind[behind] = (tokens_behind[behind] or 0) + response
      else
        local of_tail = response
        repeat
          local version, made
          version, made, place = struct.unpack(Record.VERSION_TOKENS, responses_of, place)
          local late = train_version - (version < tail and version or tail)
          by_token[late], of_tail = (by_token[late] or 0) + made, of_tail - made
        until place > #responses_of
        by_token[waited] = (by_token[waited] or 0) + of_tail
      end
    end
    environments[environment] = {#its, samples, tokens, bytes, responses, staleness, pre_queue, in_queue,
      token_staleness}
    own.samples, own.tokens, own.bytes = own.samples + samples, own.tokens + tokens, own.bytes + bytes
    own.staleness_sum = own.staleness_sum + staleness
  end
  own.loss_tokens, own.staleness_max = loss_tokens, most
  for version, count in pairs(by_version) do
    local waited = train_version - version
    by_total[waited], by_in_queue[waited] = (by_total[waited] or 0) + count, (by_in_queue[waited] or 0) + count
    by_pre_queue[0] = (by_pre_queue[0] or 0) + count
  end
  for behind, tokens in pairs(tokens_behind) do
    local versions = floor(behind / 1000)
    by_token[versions] = (by_token[versions] or 0) + tokens
  end
  return environments, own, {spanning, longest_tokens, rewards, turns, truncated_samples},
    {by_total, by_pre_queue, by_in_queue, by_token}
end

-- Counts groups, summed by environment, in (sign 1) or out of (-1) the sizes of a step.
function Batches.count(header, sign, environments)
  for environment, sums in pairs(environments) do
    local amount = header.environments[environment] or {0, 0, 0, 0}
    header.environments[environment] = amount
    Ledger.add_amount(amount, sign, unpack(sums, 1, 4))
    header.groups, header.samples = header.groups + sign * sums[A_GROUPS], header.samples + sign * sums[A_SAMPLES]
    header.tokens, header.bytes = header.tokens + sign * sums[A_TOKENS], header.bytes + sign * sums[A_BYTES]
  end
end

-- Adds numbers to those under the same keys.
function Batches.add_each(sums, more)
  for key_of, number in pairs(more) do
    sums[key_of] = (sums[key_of] or 0) + number
  end
  return sums
end

-- What a step has up to a micro-batch: `before`, the same of the micro-batch before it (nil for the first), and the
-- micro-batch's own.
function Batches.up_to(before, own)
  local total = {}
  for name, value in pairs(own) do
    local earlier = before and before[name] or 0
    total[name] = name == 'staleness_max' and math.max(earlier, value) or earlier + value
  end
  return total
end

-- Trajectories of what a step has up to a micro-batch.
function Batches.trajectories(total)
  return total.samples - (total.further_rows or 0)
end

-- Fields of the chunks of one rank (from 0).
function Batches.chunk_fields(step, micro_batch, stored, rank)
  local fields = {}
  for index = 0, stored.ranks[rank + 1][2] - 1 do
    fields[index + 1] = Batches.chunk_field(step, micro_batch, rank, index)
  end
  return fields
end

-- The packed chunks of one rank.
function Batches.rank_chunks(step, micro_batch, stored, rank)
  local fields = Batches.chunk_fields(step, micro_batch, stored, rank)
  if #fields == 0 then
    return {}
  end
  return call('HMGET', key('chunks'), unpack(fields))
end

-- All groups of a micro-batch, by sequence, as they were at assembly.
function Batches.micro_batch_groups(step, micro_batch, stored)
  local groups = {}
  for rank = 0, #stored.ranks - 1 do
    for _, chunk in ipairs(Batches.rank_chunks(step, micro_batch, stored, rank)) do
      for _, group in ipairs(unpack_msg(chunk)) do
        groups[#groups + 1] = group
      end
    end
  end
  Record.sort(groups)
  return groups
end

-- Calls each(groups) with a step's own groups, by micro-batch.
function Batches.each_micro_batch(step, each)
  for micro_batch = 0, Batches.load_step(step).micro_batches - 1 do
    each(Batches.micro_batch_groups(step, micro_batch, Batches.load_micro_batch(step, micro_batch)))
  end
end

-- Writes a micro-batch with its groups split over the ranks, in place of what it had.
function Batches.store_micro_batch(ctx, step, micro_batch, stored, shards)
  for rank = 0, #(stored.ranks or {}) - 1 do
    call_many('HDEL', key('chunks'), Batches.chunk_fields(step, micro_batch, stored, rank))
  end
  stored.ranks = {}
  for rank, shard in ipairs(shards) do
    local tokens, chunks = 0, 0
    for index = 1, #shard do
      tokens = tokens + shard[index][G_TOKENS]
    end
    for first = 1, #shard, Batches.CHUNK do
      local last = math.min(first + Batches.CHUNK - 1, #shard)
      local field = Batches.chunk_field(step, micro_batch, rank - 1, chunks)
      call('HSET', key('chunks'), field, Record.pack_many(ctx, shard, first, last))
      chunks = chunks + 1
    end
    stored.ranks[rank] = {tokens, chunks}
  end
  Batches.save_micro_batch(step, micro_batch, stored)
end

-- Takes single groups out of the middle of a step: those for which is_gone(group) holds. Calls each(group) with every
-- one of them; of what the step uses again each ends as `use_as`. Returns how many there were, and how many of these
-- were its own.
function Batches.take_out(ctx, step, header, use_as, is_gone, each)
  local taken, reused, earlier = 0, 0, nil
  for micro_batch = Batches.first(header), header.micro_batches - 1 do
    local stored, before = Batches.load_micro_batch(step, micro_batch), taken
    local kept, shards = {}, {}
    for rank = 0, #stored.ranks - 1 do
      local shard = {}
      for _, chunk in ipairs(Batches.rank_chunks(step, micro_batch, stored, rank)) do
        for _, group in ipairs(unpack_msg(chunk)) do
          if is_gone(group) then
            taken = taken + 1
            if micro_batch == Batches.REUSED then
              reused = reused + 1
              Reuse.give_up(ctx, group, false)
            else
              Batches.count(header, -1, (Batches.sum({group}, header.train_version)))
              each(group)
            end
          else
            shard[#shard + 1] = group
            kept[#kept + 1] = group
          end
        end
      end
      shards[rank + 1] = shard
    end
    if taken > before then
      local _, own = Batches.sum(kept, stored.train_version or header.train_version)
      stored.own = own
      Batches.store_micro_batch(ctx, step, micro_batch, stored, shards)
    end
    if taken > 0 then
      stored.total = Batches.up_to(earlier, stored.own)
      Batches.save_micro_batch(step, micro_batch, stored)
    end
    earlier = stored.total
  end
  if taken > 0 then
    Reuse.move(ctx, 'delivered', use_as, reused)
    header.reused = header.reused and header.reused - reused
    Batches.save_step(step, header)
  end
  return taken, taken - reused
end

-- {tokens, groups} that each rank has of the micro-batches of a step before this one; nil where one of them is split
-- for another number of ranks.
function Batches.loads(step, header, micro_batch, world_size)
  local loads = {}
  for rank = 1, world_size do
    loads[rank] = {0, 0}
  end
  for earlier = Batches.first(header), micro_batch - 1 do
    local stored = Batches.load_micro_batch(step, earlier)
    if #stored.ranks ~= world_size then
      return nil
    end
    for rank, its in ipairs(stored.ranks) do
      loads[rank][1] = loads[rank][1] + its[1]
      for _, chunk in ipairs(Batches.rank_chunks(step, earlier, stored, rank - 1)) do
        loads[rank][2] = loads[rank][2] + Record.count_of(chunk)
      end
    end
  end
  return loads
end

-- Takes groups out of a step, the last ones first, about `limit` of them: calls each(groups, is_reused) with each
-- chunk. Returns what it was worth of the limit. The header is the caller's to write.
function Batches.dismantle(step, header, limit, each)
  local done = 0
  while not Batches.is_empty(header) and done < limit do
    local micro_batch = header.micro_batches - 1
    local stored = Batches.load_micro_batch(step, micro_batch)
    local ranks = stored.ranks
    while #ranks > 0 and done < limit do
      local rank = #ranks
      local chunks = ranks[rank][2]
      if chunks > 0 then
        local field = Batches.chunk_field(step, micro_batch, rank - 1, chunks - 1)
        local groups = unpack_msg(call('HGET', key('chunks'), field))
        call('HDEL', key('chunks'), field)
        each(groups, micro_batch == Batches.REUSED)
        done = done + #groups
      end
      ranks[rank] = chunks > 1 and {ranks[rank][1], chunks - 1} or nil
    end
    if #ranks > 0 then
      Batches.save_micro_batch(step, micro_batch, stored)
    else
      call('HDEL', key('micro_batches'), Batches.micro_batch_field(step, micro_batch))
      header.micro_batches = math.max(0, micro_batch)
      if micro_batch == Batches.REUSED then
        header.reused = nil
      end
      done = done + 1
    end
  end
  return done
end
