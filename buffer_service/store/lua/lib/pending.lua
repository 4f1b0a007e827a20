-- Pending tasks that are due. Each environment has a sorted set `pending:<environment>` (score: order of leasing, so
-- -2 * priority, less 1 for what came back; member: entry of lib/tasks.lua), named in hash `pending_environments` while
-- it is not empty. Those that back off are in the sorted set `delayed` (score: not_before), whatever their environment.

-- @include picking

local DELAYED, PENDING_ENVIRONMENTS = key('delayed'), key('pending_environments')
local pending_named, pending_left = nil, {}

local function pending_key(environment)
  return key('pending:' .. environment)
end

local function pending_names()
  if not pending_named then
    pending_named = {}
    for _, environment in ipairs(call('HKEYS', PENDING_ENVIRONMENTS)) do
      pending_named[environment] = true
    end
  end
  return pending_named
end

local function add_pending(environment, score, member)
  local named = pending_names()
  if not named[environment] then
    named[environment] = true
    call('HSET', PENDING_ENVIRONMENTS, environment, 1)
  end
  call('ZADD', pending_key(environment), score, member)
end

-- Takes an entry out, wherever it is.
local function remove_pending(environment, member)
  if call('ZREM', pending_key(environment), member) == 1 then
    pending_left[environment] = true
  else
    call('ZREM', DELAYED, member)
  end
end

before_close[#before_close + 1] = function()
  for environment in pairs(pending_left) do
    if call('EXISTS', pending_key(environment)) == 0 then
      call('HDEL', PENDING_ENVIRONMENTS, environment)
    end
  end
end

-- Number of pending tasks, those that back off included.
local function pending_count()
  local count = call('ZCARD', DELAYED)
  for environment in pairs(pending_names()) do
    count = count + call('ZCARD', pending_key(environment))
  end
  return count
end

local function pending_rank(source, member, score)
  local own = floor(-score / 2)
  return -effective_priority(source.environment, own), score, tonumber(string.sub(member, 1, 15))
end

-- Up to `count` entries that are due, in order of leasing, and what the caller gives to close_picking; they are the
-- caller's to take out.
local function pick_pending(count)
  local sources = {}
  for environment in pairs(pending_names()) do
    sources[#sources + 1] = {at = pending_key(environment), environment = environment, rank = pending_rank}
  end
  return pick_many(sources, 'lease_stride', count)
end
