-- Indexes over the queued groups, whose records are in hash `groups`.
--
-- A class is an environment and a priority. Each has two sorted sets: `q:<priority>:<environment>` (score: sequence,
-- member: group id) and `a:<priority>:<environment>` (score: age by the policy's measure, member: fixed-width sequence
-- and group id, so that equal ages go by sequence). Hash `classes` names those that are not empty.

-- @include record
-- @include picking

local GROUPS, CLASSES = key('groups'), key('classes')
-- Classes that this script has met: all of them once load_classes was called.
local class_list, all_loaded = {}, false
-- By environment, then priority.
local class_by = {}
local queued_now

-- Queued groups, counted from what exists.
local function queued_count()
  queued_now = queued_now or call('HLEN', GROUPS)
  return queued_now
end

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
    -- The oldest group's sequence and id: nil when not known, false when there is none.
    oldest = nil, oldest_id = nil,
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

before_close[#before_close + 1] = function()
  for _, class in ipairs(class_list) do
    if class.left and call('EXISTS', class.q) == 0 then
      call('HDEL', CLASSES, class.name)
    end
  end
end

-- Calls visit(q key, a key, priority, environment) for each class.
local function for_each_class(visit)
  for _, class in ipairs(load_classes()) do
    visit(class.q, class.a, class.priority, class.environment)
  end
end

local function age_member(group)
  return format('%015d', group[G_SEQUENCE]) .. group[G_ID]
end

-- Writes a record into the queue. It must be of the present timeline.
local function index_group(group)
  local class = class_of(group[G_ENVIRONMENT], group[G_PRIORITY])
  queued_count()
  if not class.stored then
    class.stored = true
    call('HSET', CLASSES, class.name, 1)
  end
  call('HSET', GROUPS, group[G_ID], pack(group))
  call('ZADD', class.q, format('%d', group[G_SEQUENCE]), group[G_ID])
  call('ZADD', class.a, format('%d', age_of(group)), age_member(group))
  if class.oldest == false or class.oldest and group[G_SEQUENCE] < class.oldest then
    class.oldest = nil
  end
  queued_now = queued_now + 1
end

-- Takes records out of the queue.
local function unindex_groups(groups)
  local ids, by_class = {}, {}
  for index, group in ipairs(groups) do
    local class = class_of(group[G_ENVIRONMENT], group[G_PRIORITY])
    local leaving = by_class[class]
    if not leaving then
      leaving = {ids = {}, ages = {}}
      by_class[class] = leaving
    end
    ids[index] = group[G_ID]
    leaving.ids[#leaving.ids + 1] = group[G_ID]
    leaving.ages[#leaving.ages + 1] = age_member(group)
  end
  queued_count()
  call_many('HDEL', GROUPS, ids)
  for class, leaving in pairs(by_class) do
    call_many('ZREM', class.q, leaving.ids)
    call_many('ZREM', class.a, leaving.ages)
    class.left, class.oldest = true, nil
  end
  queued_now = queued_now - #groups
  if #groups > 0 then
    topics.space, topics.tasks = true, true
  end
end

-- Records of queued groups, in the order of their ids.
local function load_groups(ids)
  local groups = {}
  for first = 1, #ids, 1000 do
    for _, raw in ipairs(call('HMGET', GROUPS, unpack(ids, first, math.min(first + 999, #ids)))) do
      groups[#groups + 1] = clamp(unpack_msg(raw))
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
  return score, tonumber(string.sub(member, 1, 15))
end

local function by_priority(source, _, score)
  return -source.effective, -source.own, score
end

-- Sources for picking from classes in an order of the policy.
local function class_sources(classes, order)
  local sources = {}
  for index, class in ipairs(classes) do
    local source = {at = class.q, environment = class.environment, rank = by_sequence}
    if order == 'lifo' then
      source.reversed, source.rank = true, by_reversed_sequence
    elseif order == 'stalest_first' then
      source.at, source.rank = class.a, by_age
    elseif order == 'priority' then
      source.rank, source.own = by_priority, class.priority
      source.effective = effective_priority(class.environment, class.priority)
    end
    sources[index] = source
  end
  return sources
end

-- Takes up to `count` groups out of the queue, by the policy's order and shares; fewer when their tokens would exceed
-- `budget_tokens` (0: no budget) or their number is no multiple of `multiple`, but that many in any case. Returns
-- their records in the order in which they were picked; the ledger is the caller's to move.
local function take(count, budget_tokens, multiple)
  local order = policy.order
  local _, ids, picking = pick_many(class_sources(load_classes(), order), 'queue_stride', count)
  if order == 'stalest_first' then
    for index, member in ipairs(ids) do
      ids[index] = string.sub(member, 16)
    end
  end
  local groups = load_groups(ids)
  local kept, tokens = #groups, 0
  if budget_tokens > 0 then
    for index, group in ipairs(groups) do
      tokens = tokens + group[G_TOKENS]
      if tokens > budget_tokens then
        kept = index - 1
        break
      end
    end
  end
  kept = math.min(#groups, math.max(multiple, kept - kept % multiple))
  for index = #groups, kept + 1, -1 do
    groups[index] = nil
  end
  close_picking(picking, kept)
  unindex_groups(groups)
  return groups
end

-- Records of up to `limit` queued groups whose age is below `below` (in thousandths of a version), stalest first.
local function stalest(below, limit)
  local ids, stale = {}, {}
  for _, class in ipairs(load_classes()) do
    local age = call('ZRANGE', class.a, 0, 0, 'WITHSCORES')[2]
    if age and tonumber(age) < below then
      stale[#stale + 1] = class
    end
  end
  local picking = open_picking(class_sources(stale, 'stalest_first'), nil, 16)
  while #ids < limit do
    local first = picking.rest.sources[1]
    if not first or first.first >= below then
      break
    end
    local _, member = pick(picking)
    ids[#ids + 1] = string.sub(member, 16)
  end
  return load_groups(ids)
end

-- Record of the queued group with the smallest sequence; nil when there is none.
local function oldest_queued()
  local first
  for _, class in ipairs(load_classes()) do
    if class.oldest == nil then
      local head = call('ZRANGE', class.q, 0, 0, 'WITHSCORES')
      class.oldest, class.oldest_id = tonumber(head[2]) or false, head[1]
    end
    if class.oldest and (not first or class.oldest < first.oldest) then
      first = class
    end
  end
  return first and load_groups({first.oldest_id})[1]
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
