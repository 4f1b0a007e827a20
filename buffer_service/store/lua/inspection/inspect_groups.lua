-- One page of the queued groups, or of those of a step. Writes nothing.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {step (-1: the queue), limit, is_filtered (1 or 0), environment, after}; after: {} for the first page, else
--         `next` of the page before
-- Replies {'groups', revision, now, state ('queued' | 'forming' | 'delivered' | 'trained'), groups, next ({} after the
--         last page)}; groups as Inspecting.describe_group; next: of the queue {sequence}; of a step
--         {term, micro-batch, ranks, rank, sequence (-1: before its first group)}
--       | {'error', 'unknown_run' | 'replay_gap' | 'step_ahead' | 'page_of_other_shards', ...}
-- Complexity O(subqueues * log queued + limit); of a step O(limit + 256 log groups)

-- @include inspecting

local ctx = Run.context()
local step, limit, is_filtered, environment, after = unpack(unpack_msg(ARGV[1]), 1, 5)
if not Run.load(ctx) then
  return refuse('unknown_run')
end
local state = ctx.state
local groups = {}

local function answer(place, following)
  return reply('groups', state.revision, ctx.now, place, groups, following)
end

local function list_queue()
  local subqueues = {}
  for _, subqueue in ipairs(Queue.load_subqueues(ctx)) do
    if is_filtered == 0 or subqueue.environment == environment then
      subqueues[#subqueues + 1] = subqueue
    end
  end
  local sources = Queue.subqueue_sources(ctx, subqueues, 'fifo')
  if after[1] then
    for _, source in ipairs(sources) do
      source.skipped = call('ZCOUNT', source.at, '-inf', format('%d', after[1]))
    end
  end
  local open, members = Picking.open(sources, floor(limit / math.max(1, #sources)) + 2), {}
  while #members < limit do
    local member = Picking.next_member(open)
    if not member then
      break
    end
    members[#members + 1] = member
  end
  for index, group in ipairs(Queue.load(ctx, Blocks.of(members))) do
    groups[index] = Inspecting.describe_group(group, -1, -1)
  end
  return #members == limit and {tonumber(members[limit])} or {}
end

-- Groups of the chunk with this index, of the present timeline.
local function load_chunk(micro_batch, rank, index)
  local chunk = unpack_msg(call('HGET', key('chunks'), Batches.chunk_field(step, micro_batch, rank, index)))
  for _, group in ipairs(chunk) do
    Record.clamp(ctx, group)
  end
  return chunk
end

-- Index of the first chunk of a rank that has a group after `sequence`; the number of chunks when none has.
local function chunk_after(micro_batch, rank, chunks, sequence)
  local low, high = 0, chunks
  while low < high do
    local middle = floor((low + high) / 2)
    local chunk = load_chunk(micro_batch, rank, middle)
    if chunk[#chunk][G_SEQUENCE] <= sequence then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end

-- Looks at up to `left` groups of a rank after `sequence`. Returns how many are left to look at, and the last one's
-- sequence.
local function list_rank(micro_batch, rank, chunks, sequence, left)
  local index = sequence < 0 and 0 or chunk_after(micro_batch, rank, chunks, sequence)
  while index < chunks and left > 0 do
    for _, group in ipairs(load_chunk(micro_batch, rank, index)) do
      if left > 0 and group[G_SEQUENCE] > sequence then
        left, sequence = left - 1, group[G_SEQUENCE]
        if is_filtered == 0 or group[G_ENVIRONMENT] == environment then
          groups[#groups + 1] = Inspecting.describe_group(group, micro_batch, rank)
        end
      end
    end
    index = index + 1
  end
  return left, sequence
end

-- The position after the page, {} after the last one; nil where `after` is of other shards.
local function list_step(header)
  local term, first_micro_batch, ranks, first_rank, first_sequence = unpack(after)
  if term then
    local is_same = term == state.term and first_micro_batch < header.micro_batches
    if not is_same or ranks ~= #Batches.load_micro_batch(step, first_micro_batch).ranks then
      return nil
    end
  end
  local left = limit
  for micro_batch = first_micro_batch or 0, header.micro_batches - 1 do
    local stored = Batches.load_micro_batch(step, micro_batch)
    for rank = micro_batch == first_micro_batch and first_rank or 0, #stored.ranks - 1 do
      local chunks, sequence = stored.ranks[rank + 1][2], -1
      if micro_batch == first_micro_batch and rank == first_rank then
        sequence = first_sequence
      end
      if left == 0 then
        return {state.term, micro_batch, #stored.ranks, rank, sequence}
      elseif chunks == 0 then
        -- Something that was looked at, too.
        left = left - 1
      else
        left, sequence = list_rank(micro_batch, rank, chunks, sequence, left)
        if left == 0 then
          return {state.term, micro_batch, #stored.ranks, rank, sequence}
        end
      end
    end
  end
  return {}
end

if step < 0 then
  local following = list_queue()
  return answer('queued', following)
elseif step < state.checkpointed_steps then
  return refuse('replay_gap', step, state.checkpointed_steps)
elseif step > state.next_step or step == state.next_step and state.micro_batches == 0 then
  return refuse('step_ahead', step, state.next_step)
end
local following = list_step(Batches.load_step(step))
if not following then
  return refuse('page_of_other_shards', step)
end
return answer(Batches.step_state(ctx, step), following)
