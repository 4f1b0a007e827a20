-- Assembled steps.
--
-- hash `steps`, step → header (msgpack map): train_version, world_size, groups, samples, tokens, loss_tokens, bytes,
-- staleness_sum, staleness_max, and ranks: for each rank {tokens, chunks}. Whether its groups are delivered or trained
-- follows from committed_steps. hash `chunks`, "step/rank/index" (from 0) → msgpack array of group records in order of
-- sequence, at most CHUNK of them: what one rank pulls is returned without being unpacked, and freed in portions.

-- @include groups

local STEPS, CHUNKS = key('steps'), key('chunks')
local CHUNK = 256

local function load_step(step)
  local raw = call('HGET', STEPS, format('%d', step))
  return raw and unpack_msg(raw) or nil
end

local function save_step(step, header)
  call('HSET', STEPS, format('%d', step), pack(header))
end

local function chunk_field(step, rank, index)
  return format('%d/%d/%d', step, rank, index)
end

-- State of a step's groups in the ledger.
local function step_state(step)
  return step < state.committed_steps and 'trained' or 'delivered'
end

local function move_step(header, from, to)
  move_groups(from, to, header.groups, header.samples, header.tokens, header.bytes)
end

-- The packed chunks of one rank.
local function rank_chunks(step, header, rank)
  local fields = {}
  for index = 0, header.ranks[rank + 1][2] - 1 do
    fields[index + 1] = chunk_field(step, rank, index)
  end
  if #fields == 0 then
    return {}
  end
  return call('HMGET', CHUNKS, unpack(fields))
end

local function delete_chunks(step, header)
  for rank = 0, header.world_size - 1 do
    for index = 0, header.ranks[rank + 1][2] - 1 do
      call('HDEL', CHUNKS, chunk_field(step, rank, index))
    end
  end
end

-- All groups of a step, by sequence, as they were at assembly.
local function step_groups(step, header)
  local groups = {}
  for rank = 0, header.world_size - 1 do
    for _, chunk in ipairs(rank_chunks(step, header, rank)) do
      for _, group in ipairs(unpack_msg(chunk)) do
        groups[#groups + 1] = group
      end
    end
  end
  table.sort(groups, function(a, b) return a[G_SEQUENCE] < b[G_SEQUENCE] end)
  return groups
end

-- Forgets a step; its groups are the caller's to settle.
local function delete_step(step, header)
  delete_chunks(step, header)
  call('HDEL', STEPS, format('%d', step))
end

-- Splits groups over ranks as domain/sharding.py does: longest first, each to the rank with the fewest tokens (ties:
-- fewest groups, then lowest rank). `groups` are in order of sequence, and so are those of each shard.
local function split(groups, world_size)
  local shards = {}
  for rank = 1, world_size do
    shards[rank] = {}
  end
  if world_size == 1 then
    return {groups}
  end
  local longest, rank_of = {}, {}
  for index = 1, #groups do
    longest[index] = index
  end
  table.sort(longest, function(a, b)
    local left, right = groups[a][G_TOKENS], groups[b][G_TOKENS]
    if left ~= right then
      return left > right
    end
    return a < b
  end)
  -- A binary heap of {tokens, groups, rank}, fullest at the bottom.
  local heap = {}
  for rank = 1, world_size do
    heap[rank] = {0, 0, rank}
  end
  local function before(a, b)
    if a[1] ~= b[1] then
      return a[1] < b[1]
    elseif a[2] ~= b[2] then
      return a[2] < b[2]
    end
    return a[3] < b[3]
  end
  for _, index in ipairs(longest) do
    local top = heap[1]
    rank_of[index] = top[3]
    top[1], top[2] = top[1] + groups[index][G_TOKENS], top[2] + 1
    local at = 1
    while true do
      local child = 2 * at
      if child > world_size then
        break
      end
      if child < world_size and before(heap[child + 1], heap[child]) then
        child = child + 1
      end
      if not before(heap[child], top) then
        break
      end
      heap[at], heap[child] = heap[child], top
      at = child
    end
  end
  for index, group in ipairs(groups) do
    local shard = shards[rank_of[index]]
    shard[#shard + 1] = group
  end
  return shards
end

-- Writes the shards of a step and its header.
local function store_shards(step, header, shards)
  header.world_size, header.ranks = #shards, {}
  for rank, shard in ipairs(shards) do
    local tokens, chunks = 0, 0
    for first = 1, #shard, CHUNK do
      local last = math.min(first + CHUNK - 1, #shard)
      local portion = {}
      for index = first, last do
        portion[#portion + 1] = shard[index]
        tokens = tokens + shard[index][G_TOKENS]
      end
      call('HSET', CHUNKS, chunk_field(step, rank - 1, chunks), pack(portion))
      chunks = chunks + 1
    end
    header.ranks[rank] = {tokens, chunks}
  end
  save_step(step, header)
end

-- Sizes and staleness (as of assembly) of groups, into the header.
local function measure(header, groups)
  header.groups, header.samples, header.tokens, header.loss_tokens, header.bytes = #groups, 0, 0, 0, 0
  header.staleness_sum, header.staleness_max = 0, 0
  for _, group in ipairs(groups) do
    header.samples = header.samples + group[G_SAMPLES]
    header.tokens = header.tokens + group[G_TOKENS]
    header.loss_tokens = header.loss_tokens + group[G_LOSS_TOKENS]
    header.bytes = header.bytes + group[G_BYTES]
    local staleness = math.max(0, header.train_version - group[G_HEAD])
    header.staleness_sum = header.staleness_sum + staleness
    header.staleness_max = math.max(header.staleness_max, staleness)
  end
end
