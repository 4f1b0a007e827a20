-- Picks members from several sorted sets in one order, and shares the picks out among environments.
--
-- A source is {at = key of a sorted set, reversed, environment, rank = function(source, member, score)}. `rank` gives a
-- member's place against those of other sources: up to three numbers, smaller ones first; each sorted set must already
-- be in that order. Sources are read in blocks while nothing is removed from them.
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

-- Moves a source to its next member; false at its end.
local function advance(source)
  if source.next > #source.items then
    local command = source.reversed and 'ZREVRANGE' or 'ZRANGE'
    source.items = call(command, source.at, source.read, source.read + source.block - 1, 'WITHSCORES')
    source.read, source.next = source.read + source.block, 1
    source.block = math.min(2 * source.block, LARGEST_BLOCK)
  end
  local member = source.items[source.next]
  if not member then
    return false
  end
  local first, second, third = source.rank(source, member, tonumber(source.items[source.next + 1]))
  source.member, source.first, source.second, source.third = member, first, second or 0, third or 0
  source.next = source.next + 2
  return true
end

-- Begins to pick from sources; `stride` names the stride state, nil picks in order without shares.
local function open_picking(sources, stride, block)
  local picking = {lanes = {}, rest = {sources = {}}, log = {}}
  local lanes, by_environment, places = picking.lanes, {}, nil
  if stride and shares_on() then
    local raw = call('HGET', RUN, stride)
    picking.stride, picking.virtual, picking.passes = stride, 0, {}
    places = environment_places()
    if raw then
      picking.virtual, picking.passes = unpack(unpack_msg(raw))
    end
  end
  for _, source in ipairs(sources) do
    source.items, source.next, source.read, source.block = {}, 1, 0, block
    if advance(source) then
      local environment = source.environment
      local lane = picking.rest
      if picking.stride and share_of(environment) > 0 then
        lane = by_environment[environment]
        if not lane then
          local pass = math.max(picking.passes[environment] or 0, picking.virtual)
          lane = {
            environment = environment, place = places[environment], share = share_of(environment), pass = pass,
            sources = {},
          }
          by_environment[environment] = lane
          lanes[#lanes + 1] = lane
        end
      end
      lane.sources[#lane.sources + 1] = source
    end
  end
  for _, lane in ipairs(lanes) do
    make_heap(lane.sources, source_before)
  end
  make_heap(lanes, lane_before)
  make_heap(picking.rest.sources, source_before)
  return picking
end

local function settle(heap, stays, before)
  if stays then
    sink(heap, 1, before)
  else
    pop(heap, before)
  end
end

-- The next source to pick from and its member; nil when there is none.
local function pick(picking)
  local lane = picking.lanes[1] or picking.rest
  local source = lane.sources[1]
  if not source then
    return nil
  end
  local member = source.member
  settle(lane.sources, advance(source), source_before)
  if lane.pass then
    picking.log[#picking.log + 1] = {lane.environment, picking.passes[lane.environment], picking.virtual}
    picking.virtual = lane.pass
    lane.pass = lane.pass + floor(STRIDE / lane.share)
    picking.passes[lane.environment] = lane.pass
    settle(picking.lanes, lane.sources[1], lane_before)
  elseif picking.stride then
    picking.log[#picking.log + 1] = false
  end
  return source, member
end

-- Ends picking with the first `kept` picks: the others never were.
local function close_picking(picking, kept)
  if not picking.stride then
    return
  end
  for index = #picking.log, kept + 1, -1 do
    local before = picking.log[index]
    if before then
      picking.passes[before[1]], picking.virtual = before[2], before[3]
    end
  end
  for environment, pass in pairs(picking.passes) do
    if pass <= picking.virtual then
      picking.passes[environment] = nil
    end
  end
  call('HSET', RUN, picking.stride, pack({picking.virtual, picking.passes}))
end

-- Picks up to `count` members. Returns their sources and the members, and what close_picking ends.
local function pick_many(sources, stride, count)
  if #sources == 1 and not shares_on() then
    local source = sources[1]
    local members = call(source.reversed and 'ZREVRANGE' or 'ZRANGE', source.at, 0, count - 1)
    local picked = {}
    for index = 1, #members do
      picked[index] = source
    end
    return picked, members, {}
  end
  local picking = open_picking(sources, stride, math.min(64, floor(count / math.max(1, #sources)) + 2))
  local picked, members = {}, {}
  for index = 1, count do
    local source, member = pick(picking)
    if not source then
      break
    end
    picked[index], members[index] = source, member
  end
  return picked, members, picking
end
