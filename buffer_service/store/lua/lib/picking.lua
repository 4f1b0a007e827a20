-- Picks members from several sorted sets in one order, and shares the picks out among environments.
--
-- A source is {at = key of a sorted set, reversed, skipped (first members that are passed over, nil for none),
-- environment, rank = function(source, member, score)}. `rank` gives a member's place against those of other sources:
-- up to three numbers, smaller ones first; each sorted set must already be in that order. Sources are read in blocks
-- while nothing is removed from them.
--
-- Shares are on when any rule of the policy has one. Environments with a share above 0 then take turns by stride
-- scheduling (Waldspurger and Weihl 1995): the one with the least pass, its name breaking ties, is picked from and its
-- pass rises by STRIDE / share; those with share 0 are picked from when no other has anything. A stride state is
-- {virtual, passes by environment}, in a field of the run's hash; virtual is the pass of the last pick, below which no
-- environment that joins may start, so a pass that is not above it is forgotten.

-- @include run
-- @include heap

local STRIDE = 1048576
local LARGEST_BLOCK = 256

local rules

local function rule_of(environment)
  if not rules then
    rules = {}
    for _, rule in ipairs(policy.environments) do
      rules[rule[1]] = rule
    end
  end
  return rules[environment]
end

local function share_of(environment)
  local rule = rule_of(environment)
  return rule and rule[2] >= 0 and rule[2] or 1
end

-- Priority of an environment's things against others', when each has `own`.
local function effective_priority(environment, own)
  local rule = rule_of(environment)
  return rule and rule[3] >= 0 and rule[3] or own
end

local function shares_on()
  for _, rule in ipairs(policy.environments) do
    if rule[2] >= 0 then
      return true
    end
  end
  return false
end

-- Places of the run's environments in the order of their bytes (Lua's own order follows the server's locale).
local function environment_places()
  local places = {}
  for place, environment in ipairs(call('ZRANGE', key('environments'), 0, -1)) do
    places[environment] = place
  end
  return places
end

local function source_before(a, b)
  if a.first ~= b.first then
    return a.first < b.first
  elseif a.second ~= b.second then
    return a.second < b.second
  end
  return a.third < b.third
end

local function lane_before(a, b)
  if a.pass ~= b.pass then
    return a.pass < b.pass
  end
  return a.place < b.place
end

-- Moves a source to its next member; false at its end. One without a rank is alone in its lane: it needs no scores.
local function advance(source)
  local rank = source.rank
  if source.next > #source.items then
    local command, last = source.reversed and 'ZREVRANGE' or 'ZRANGE', source.read + source.block - 1
    if rank then
      source.items = call(command, source.at, source.read, last, 'WITHSCORES')
    else
      source.items = call(command, source.at, source.read, last)
    end
    source.read, source.next = source.read + source.block, 1
    source.block = math.min(2 * source.block, LARGEST_BLOCK)
  end
  local member = source.items[source.next]
  if not member then
    return false
  end
  source.member = member
  if rank then
    local first, second, third = rank(source, member, tonumber(source.items[source.next + 1]))
    source.first, source.second, source.third = first, second or 0, third or 0
    source.next = source.next + 2
  else
    source.next = source.next + 1
  end
  return true
end

-- The lanes that sources with a share above 0 are in, one for each environment, and the sources that are in none.
local function lanes_of(sources, virtual, passes)
  local lanes, rest, by_environment, places = {}, {}, {}, environment_places()
  for _, source in ipairs(sources) do
    local environment = source.environment
    local lane, share = by_environment[environment], share_of(environment)
    if share == 0 then
      rest[#rest + 1] = source
    elseif lane then
      lane.sources[#lane.sources + 1] = source
    else
      local pass = math.max(passes[environment] or 0, virtual)
      lane = {
        environment = environment, place = places[environment], stride = floor(STRIDE / share), sources = {source},
        -- Its pass at the next pick, and after the picks that were kept.
        pass = pass, kept_pass = pass,
      }
      by_environment[environment], lanes[#lanes + 1] = lane, lane
    end
  end
  return lanes, rest
end

-- Reads the first members of sources, `block` of each at first; a heap of those that have any.
local function open_sources(sources, block)
  local open = {}
  for _, source in ipairs(sources) do
    source.items, source.next, source.read, source.block = {}, 1, source.skipped or 0, block
    if advance(source) then
      open[#open + 1] = source
    end
  end
  make_heap(open, source_before)
  return open
end

-- Begins to pick from sources; `stride` names the stride state, nil picks in order without shares.
local function open_picking(sources, stride, block)
  local picking = {lanes = {}, picked = {}}
  local lanes, rest = {}, sources
  if stride and shares_on() then
    local raw = call('HGET', RUN, stride)
    picking.stride, picking.virtual, picking.passes = stride, 0, {}
    if raw then
      picking.virtual, picking.passes = unpack(unpack_msg(raw))
    end
    lanes, rest = lanes_of(sources, picking.virtual, picking.passes)
  end
  for _, lane in ipairs(lanes) do
    if #lane.sources == 1 then
      lane.sources[1].rank = nil
    end
    lane.sources = open_sources(lane.sources, block)
    if lane.sources[1] then
      picking.lanes[#picking.lanes + 1] = lane
    end
  end
  make_heap(picking.lanes, lane_before)
  picking.rest = {sources = open_sources(rest, block)}
  return picking
end

local function settle(heap, stays, before)
  if stays then
    sink(heap, 1, before)
  else
    pop(heap, before)
  end
end

-- The next member; nil when there is none.
local function pick(picking)
  local lane = picking.lanes[1] or picking.rest
  local source = lane.sources[1]
  if not source then
    return nil
  end
  local member = source.member
  settle(lane.sources, advance(source), source_before)
  if lane.pass then
    lane.pass = lane.pass + lane.stride
    settle(picking.lanes, lane.sources[1], lane_before)
  end
  picking.picked[#picking.picked + 1] = lane
  return member
end

-- Ends picking with the first `kept` picks: the others never were.
local function close_picking(picking, kept)
  if not picking.stride then
    return
  end
  for index = 1, kept do
    local lane = picking.picked[index]
    if lane.pass then
      picking.virtual, lane.kept_pass = lane.kept_pass, lane.kept_pass + lane.stride
      picking.passes[lane.environment] = lane.kept_pass
    end
  end
  for environment, pass in pairs(picking.passes) do
    if pass <= picking.virtual then
      picking.passes[environment] = nil
    end
  end
  call('HSET', RUN, picking.stride, pack({picking.virtual, picking.passes}))
end

-- Picks up to `count` members. Returns them, and what close_picking ends.
local function pick_many(sources, stride, count)
  if #sources == 1 and not shares_on() then
    local source = sources[1]
    return call(source.reversed and 'ZREVRANGE' or 'ZRANGE', source.at, 0, count - 1), {}
  end
  local picking = open_picking(sources, stride, math.min(64, floor(count / math.max(1, #sources)) + 2))
  local members = {}
  for index = 1, count do
    local member = pick(picking)
    if not member then
      break
    end
    members[index] = member
  end
  return members, picking
end
