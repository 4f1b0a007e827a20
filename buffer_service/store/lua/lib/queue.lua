-- The queued groups' records and the indexes over them.
--
-- A group's member is its sequence in fixed width. Its record is under the member in a block (lib/blocks.lua). Groups
-- that leave together mostly came together, so a pull reads and removes records in a few small hashes. One hash of all
-- records would cost it two accesses a group to memory that no cache holds, and more while that hash grows or shrinks.
--
-- A class is an environment and a priority. Each has two sorted sets of members: `q:<priority>:<environment>` (score:
-- sequence) and `a:<priority>:<environment>` (score: age by the policy's measure; equal ages go by sequence). Hash
-- `classes` names those that are not empty.

-- @include record
-- @include blocks
-- @include picking

local CLASSES = key('classes')
-- Classes that this script has met: all of them once load_classes was called.
local class_list, all_loaded = {}, false
-- By environment, then priority.
local class_by = {}
-- Groups of all classes.
local queued_now

local function class_of(environment, priority)
  local by_priority = class_by[environment]
  local class = by_priority and by_priority[priority]
  if class then
    return class
  end
  local name = format('%d:', priority) .. environment
  class = {
    name = name, stored = false, left = false, q = key('q:' .. name), a = key('a:' .. name),
    priority = priority, environment = environment,
    -- Groups that it has, as of queued_count.
    count = 0,
    -- The oldest group's member: nil when not known, false when there is none.
    oldest = nil,
  }
  class_by[environment] = by_priority or {}
  class_by[environment][priority] = class
  class_list[#class_list + 1] = class
  return class
end

local function load_classes()
  if not all_loaded then
    all_loaded = true
    for _, name in ipairs(call('HKEYS', CLASSES)) do
      local colon = string.find(name, ':', 1, true)
      class_of(string.sub(name, colon + 1), tonumber(string.sub(name, 1, colon - 1))).stored = true
    end
  end
  return class_list
end

-- Queued groups, counted from what exists, with those that are gathered for a round (lib/gathering.lua).
local function queued_count()
  if not queued_now then
    queued_now = 0
    for _, class in ipairs(load_classes()) do
      class.count = call('ZCARD', class.q)
      queued_now = queued_now + class.count
    end
  end
  return queued_now + (state.gathered and state.gathered[2] or 0)
end

before_close[#before_close + 1] = function()
  for _, class in ipairs(class_list) do
    if class.left and class.count == 0 then
      call('HDEL', CLASSES, class.name)
    end
  end
end

-- Writes a record into the queue. It must be of the present timeline.
local function index_group(group)
  local class = class_of(group[G_ENVIRONMENT], group[G_PRIORITY])
  queued_count()
  if not class.stored then
    class.stored = true
    call('HSET', CLASSES, class.name, 1)
  end
  local member = member_of(group[G_SEQUENCE])
  call('HSET', block_key(block_of(member)), member, pack(group))
  call('ZADD', class.q, format('%d', group[G_SEQUENCE]), member)
  call('ZADD', class.a, format('%d', age_of(group)), member)
  if class.oldest == false or class.oldest and member < class.oldest then
    class.oldest = nil
  end
  class.count, queued_now = class.count + 1, queued_now + 1
end

-- The members of groups by class.
local function split_by_class(groups, members)
  local by_class, class, count = {}, nil, 0
  for index = 1, #groups do
    local group = groups[index]
    local environment, priority = group[G_ENVIRONMENT], group[G_PRIORITY]
    if not class or class.environment ~= environment or class.priority ~= priority then
      class = class_of(environment, priority)
      by_class[class] = by_class[class] or {}
      count = #by_class[class]
    end
    count = count + 1
    by_class[class][count] = members[index]
  end
  return by_class
end

-- Takes records, with their members and blocks, out of the queue. Of their classes they are the first ones in this
-- order.
local function unindex_groups(groups, members, blocks, order)
  if #groups == 0 then
    return
  end
  queued_count()
  for _, block in ipairs(blocks) do
    call_many('HDEL', block.key, block.members)
  end
  for class, leaving in pairs(split_by_class(groups, members)) do
    local ordered, other, count = class.q, class.a, #leaving
    if order == 'stalest_first' then
      ordered, other = other, ordered
    end
    if order == 'lifo' then
      call('ZREMRANGEBYRANK', ordered, -count, -1)
    else
      call('ZREMRANGEBYRANK', ordered, 0, count - 1)
    end
    call_many('ZREM', other, leaving)
    class.left, class.oldest, class.count = true, nil, class.count - count
  end
  queued_now = queued_now - #groups
  topics.space, topics.tasks = true, true
end

-- Records of queued groups, in the order of their members, of which these are the blocks.
local function load_groups(blocks)
  local groups = {}
  for _, block in ipairs(blocks) do
    local places = block.places
    for index, raw in ipairs(call('HMGET', block.key, unpack(block.members))) do
      groups[places[index]] = unpack_record(raw)
    end
  end
  return groups
end

local function by_sequence(_, _, score)
  return score
end

local function by_reversed_sequence(_, _, score)
  return -score
end

local function by_age(_, member, score)
  return score, tonumber(member)
end

local function by_priority(source, _, score)
  return -source.effective, -source.own, score
end

-- Sources for picking from classes in an order of the policy.
local function class_sources(classes, order)
  local sources = {}
  for index, class in ipairs(classes) do
    local source = {at = class.q, environment = class.environment, size = class.count, rank = by_sequence}
    if order == 'lifo' then
      source.reversed, source.rank = true, by_reversed_sequence
    elseif order == 'stalest_first' then
      source.at, source.rank = class.a, by_age
    elseif order == 'priority' then
      source.rank, source.own = by_priority, class.priority
      source.effective = effective_priority(class.environment, class.priority)
    elseif order ~= 'fifo' then
      error('unknown order ' .. order)
    end
    sources[index] = source
  end
  return sources
end

-- Takes up to `count` groups out of the queue, by the policy's order and shares; fewer when their tokens would exceed
-- `budget_tokens` (nil: no budget) or their number is no multiple of `multiple`, but `least` in any case. Returns their
-- records in the order in which they were picked; the ledger is the caller's to move.
local function take(count, budget_tokens, multiple, least)
  local order = policy.order
  queued_count()
  local members, picking = pick_many(class_sources(load_classes(), order), 'queue_stride', count)
  local blocks = blocks_of(members)
  local groups = load_groups(blocks)
  local kept, tokens = #groups, 0
  if budget_tokens then
    for index, group in ipairs(groups) do
      tokens = tokens + group[G_TOKENS]
      if tokens > budget_tokens then
        kept = index - 1
        break
      end
    end
  end
  kept = math.min(#groups, math.max(least, kept - kept % multiple))
  if kept < #groups then
    for index = #groups, kept + 1, -1 do
      groups[index], members[index] = nil, nil
    end
    blocks = blocks_of(members)
  end
  close_picking(picking, kept)
  unindex_groups(groups, members, blocks, order)
  return groups
end

-- Records of up to `limit` queued groups whose age is below `below` (in thousandths of a version), stalest first, their
-- members, and the blocks of those.
local function stalest(below, limit)
  local members, stale = {}, {}
  for _, class in ipairs(load_classes()) do
    local age = call('ZRANGE', class.a, 0, 0, 'WITHSCORES')[2]
    if age and tonumber(age) < below then
      stale[#stale + 1] = class
    end
  end
  local open = open_sources(class_sources(stale, 'stalest_first'), 16)
  while #members < limit and open[1] and open[1].first < below do
    members[#members + 1] = next_member(open)
  end
  local blocks = blocks_of(members)
  return load_groups(blocks), members, blocks
end

-- Record of the queued group with the smallest sequence, and its member; nil when there is none.
local function oldest_queued()
  local first
  for _, class in ipairs(load_classes()) do
    if class.oldest == nil then
      class.oldest = call('ZRANGE', class.q, 0, 0)[1] or false
    end
    if class.oldest and (not first or class.oldest < first) then
      first = class.oldest
    end
  end
  if first then
    return load_groups(blocks_of({first}))[1], first
  end
  return nil
end

-- Queued groups of abandoned versions count as made with `version`, from which the present timeline starts. Brings up
-- to `limit` of their ages up to date and returns how many.
local function clamp_ages(version, limit)
  local age, done = format('%d', 1000 * version), 0
  for _, class in ipairs(load_classes()) do
    for _, member in ipairs(call('ZRANGEBYSCORE', class.a, '(' .. age, '+inf', 'LIMIT', 0, limit - done)) do
      call('ZADD', class.a, age, member)
      done = done + 1
    end
  end
  return done
end
