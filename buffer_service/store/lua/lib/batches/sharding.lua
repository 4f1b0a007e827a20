-- Splits groups over ranks as domain/sharding.py does.

-- @include record
-- @include heap

local Sharding = {}

function Sharding.rank_before(a, b)
  if a.tokens ~= b.tokens then
    return a.tokens < b.tokens
  elseif a.groups ~= b.groups then
    return a.groups < b.groups
  end
  return a.rank < b.rank
end

-- Longest first, each to the rank with the fewest tokens (ties: fewest groups, then lowest rank); with `equal`, among
-- the ranks that have not got their share of the groups yet. `groups` are in order of sequence, and so are those of
-- each shard. `loads`: {tokens, groups} that each rank has before, which count; nil for none.
function Sharding.split(groups, world_size, equal, loads)
  if world_size == 1 then
    return {groups}
  end
  local shards, ranks, all = {}, {}, #groups
  for rank = 1, world_size do
    local load = loads and loads[rank] or {0, 0}
    shards[rank], all = {}, all + load[2]
    ranks[rank] = {tokens = load[1], groups = load[2], rank = rank}
  end
  local most, heap = equal and math.ceil(all / world_size) or math.huge, {}
  for _, rank in ipairs(ranks) do
    if rank.groups < most then
      heap[#heap + 1] = rank
    end
  end
  if loads then
    table.sort(heap, Sharding.rank_before)
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
  for _, index in ipairs(longest) do
    local top = heap[1]
    rank_of[index] = top.rank
    top.tokens, top.groups = top.tokens + groups[index][G_TOKENS], top.groups + 1
    if top.groups < most then
      Heap.sink(heap, 1, Sharding.rank_before)
    else
      Heap.pop(heap, Sharding.rank_before)
    end
  end
  for index, group in ipairs(groups) do
    local shard = shards[rank_of[index]]
    shard[#shard + 1] = group
  end
  return shards
end
