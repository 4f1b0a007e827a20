-- Picks members from several sorted sets in one order, and shares the picks out among environments.
--
-- A source is {at = key of a sorted set, reversed, skipped (first members that are passed over, nil for none), size
-- (how many members it has, nil when they were not counted), most (how many may be picked, nil for any number),
-- environment, rank = function(source, member, score)}.
-- `rank` gives a member's place against those of other sources: up to three numbers, smaller ones first; each sorted
-- set must already be in that order. Sources are read while nothing is removed from them.
--
-- Shares are on when any rule of the policy has one. Environments with a share above 0 then take turns by stride
-- scheduling (Waldspurger and Weihl 1995): the one with the least pass, its name breaking ties, is picked from and its
-- pass rises by STRIDE / share; those with share 0 are picked from when no other has anything. Whose turn it is depends
-- on how much each has, not on what: all turns are taken first, and no more is read than is picked. A stride state is
-- {virtual, passes by environment}, in a field of the run's hash; virtual is the pass of the last pick, below which no
-- environment that joins may start, so a pass that is not above it is forgotten.

-- @include run
-- @include heap

local Picking = {}

Picking.STRIDE = 1048576
Picking.LARGEST_BLOCK = 256

-- The policy's rule of an environment, nil for none; ctx.rules has all of them.
function Picking.rule_of(ctx, environment)
  if not ctx.rules then
    ctx.rules = {}
    for _, rule in ipairs(ctx.policy.environments) do
      ctx.rules[rule[1]] = rule
    end
  end
  return ctx.rules[environment]
end

function Picking.share_of(ctx, environment)
  local rule = Picking.rule_of(ctx, environment)
  return rule and rule[2] >= 0 and rule[2] or 1
end

-- Priority of an environment's things against others', when each has `own`.
function Picking.priority_of(ctx, environment, own)
  local rule = Picking.rule_of(ctx, environment)
  return rule and rule[3] >= 0 and rule[3] or own
end

function Picking.shares_on(ctx)
  for _, rule in ipairs(ctx.policy.environments) do
    if rule[2] >= 0 then
      return true
    end
  end
  return false
end

-- Index of each of the run's environments in the order of their bytes (Lua's own order follows the server's locale).
function Picking.environment_indexes()
  local indexes = {}
  for index, environment in ipairs(call('ZRANGE', key('environments'), 0, -1)) do
    indexes[environment] = index
  end
  return indexes
end

function Picking.source_before(a, b)
  if a.first ~= b.first then
    return a.first < b.first
  elseif a.second ~= b.second then
    return a.second < b.second
  end
  return a.third < b.third
end

-- Moves a source to its next member; false at its end.
function Picking.advance(source)
  if source.most then
    source.given = (source.given or 0) + 1
    if source.given > source.most then
      return false
    end
  end
  if source.next > #source.items then
    local command, last = source.reversed and 'ZREVRANGE' or 'ZRANGE', source.read + source.block - 1
    source.items = call(command, source.at, source.read, last, 'WITHSCORES')
    source.read, source.next = source.read + source.block, 1
    source.block = math.min(2 * source.block, Picking.LARGEST_BLOCK)
  end
  local member = source.items[source.next]
  if not member then
    return false
  end
  source.member = member
  local first, second, third = source.rank(source, member, tonumber(source.items[source.next + 1]))
  source.first, source.second, source.third = first, second or 0, third or 0
  source.next = source.next + 2
  return true
end

-- Begins to merge sources, reading `block` members of each at first: a heap of those that have any.
function Picking.open(sources, block)
  local open = {}
  for _, source in ipairs(sources) do
    source.items, source.next, source.read, source.block = {}, 1, source.skipped or 0, block
    if Picking.advance(source) then
      open[#open + 1] = source
    end
  end
  Heap.make(open, Picking.source_before)
  return open
end

-- The next member of sources that are open; nil when there is none.
function Picking.next_member(open)
  local source = open[1]
  if not source then
    return nil
  end
  local member = source.member
  if Picking.advance(source) then
    Heap.sink(open, 1, Picking.source_before)
  else
    Heap.pop(open, Picking.source_before)
  end
  return member
end

-- Up to `count` first members of sources; at least one is asked for.
function Picking.first_members(sources, count)
  local source, members = sources[1], {}
  if #sources == 1 then
    count = math.min(count, source.most or count)
    if count == 0 then
      return {}
    end
    return call(source.reversed and 'ZREVRANGE' or 'ZRANGE', source.at, 0, count - 1)
  end
  local open = Picking.open(sources, math.min(64, floor(count / math.max(1, #sources)) + 2))
  for index = 1, count do
    members[index] = Picking.next_member(open)
    if not members[index] then
      break
    end
  end
  return members
end

-- The lanes that sources with a share above 0 are in, one for each environment that has anything, and the sources that
-- are in none.
function Picking.lanes_of(ctx, sources, virtual, passes)
  local lanes, rest, by_environment, indexes = {}, {}, {}, Picking.environment_indexes()
  for _, source in ipairs(sources) do
    local environment = source.environment
    local lane, share = by_environment[environment], Picking.share_of(ctx, environment)
    local size = share > 0 and (source.size or call('ZCARD', source.at)) or 0
    size = math.min(size, source.most or size)
    if share == 0 then
      rest[#rest + 1] = source
    elseif lane then
      lane.sources[#lane.sources + 1], lane.size = source, lane.size + size
    elseif size > 0 then
      lane = {
        environment = environment, index = indexes[environment], stride = floor(Picking.STRIDE / share),
        sources = {source},
        -- Its pass before its turns, and how many it has and may have of those.
        pass = math.max(passes[environment] or 0, virtual), turns = 0, size = size,
      }
      by_environment[environment], lanes[#lanes + 1] = lane, lane
    end
  end
  return lanes, rest
end

-- Up to `count` turns of lanes, as a list of lanes. A lane's pass and index are one number here: passes are at most
-- STRIDE ahead of `virtual`, a turn adds no more than that, and a run has fewer than `most` environments.
function Picking.take_turns(lanes, virtual, count)
  local heap, lane_at, turns, most, never = {}, {}, {}, 512, math.huge
  for at, lane in ipairs(lanes) do
    heap[at], lane_at[lane.index] = (lane.pass - virtual) * most + lane.index, lane
  end
  table.sort(heap)
  for index = 1, #lanes > 0 and count or 0 do
    local first = heap[1]
    if first == never then
      break
    end
    local lane = lane_at[first % most]
    local taken = lane.turns + 1
    turns[index], lane.turns = lane, taken
    Heap.replace_first(heap, #lanes, taken < lane.size and first + lane.stride * most or never)
  end
  return turns
end

-- Picks up to `count` members; `stride` names the stride state. Returns them, and what Picking.close ends.
function Picking.pick(ctx, sources, stride, count)
  if not Picking.shares_on(ctx) then
    return Picking.first_members(sources, count), nil
  end
  local raw = call('HGET', RUN, stride)
  local picking = {stride = stride, virtual = 0, passes = {}}
  if raw then
    picking.virtual, picking.passes = unpack(unpack_msg(raw))
  end
  local lanes, rest = Picking.lanes_of(ctx, sources, picking.virtual, picking.passes)
  local turns, members = Picking.take_turns(lanes, picking.virtual, count), {}
  picking.lanes, picking.turns = lanes, turns
  for _, lane in ipairs(lanes) do
    if lane.turns > 0 then
      lane.members, lane.next = Picking.first_members(lane.sources, lane.turns), 1
    end
  end
  for index, lane in ipairs(turns) do
    local at = lane.next
    members[index], lane.next = lane.members[at], at + 1
  end
  local others = #turns < count and rest[1] and Picking.first_members(rest, count - #turns) or {}
  for index, member in ipairs(others) do
    members[#turns + index] = member
  end
  return members, picking
end

-- Ends picking with the first `kept` picks: the others never were.
function Picking.close(picking, kept)
  if not picking then
    return
  end
  for index = kept + 1, #picking.turns do
    local lane = picking.turns[index]
    lane.turns = lane.turns - 1
  end
  for _, lane in ipairs(picking.lanes) do
    if lane.turns > 0 then
      local last = lane.pass + (lane.turns - 1) * lane.stride
      picking.virtual, picking.passes[lane.environment] = math.max(picking.virtual, last), last + lane.stride
    end
  end
  for environment, pass in pairs(picking.passes) do
    if pass <= picking.virtual then
      picking.passes[environment] = nil
    end
  end
  call('HSET', RUN, picking.stride, pack({picking.virtual, picking.passes}))
end
