-- One page of the tasks that are pending, leased, or ended outside of any batch. Writes nothing.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {set ('pending' | 'leased' | 'ended'), limit, is_filtered (1 or 0), environment, worker_id ('' for all),
--         after}; after: {} for the first page, else `next` of the page before
-- Replies {'tasks', revision, now, ttl_ms (of leases), tasks, next ({} after the last page)}; tasks as
--         Inspecting.describe_task; next: pending {1 (due) or 0 (backing off), environment, score, sequence}; leased
--         {cursor}; ended {number}
--       | {'error', 'unknown_run'}
-- Complexity O(environments + limit * log pending); leased: what SCAN looks at for `limit`

-- @include inspecting

local ctx = Run.context()
local set, limit, is_filtered, environment, worker_id, after = unpack(unpack_msg(ARGV[1]), 1, 6)
if not Run.load(ctx) then
  return refuse('unknown_run')
end
local tasks = {}

local function add(task_id, not_before, expiry)
  local task = Tasks.load(task_id)
  if task and (is_filtered == 0 or task.environment == environment) then
    tasks[#tasks + 1] = Inspecting.describe_task(ctx, task_id, task, not_before, expiry)
  end
end

local function answer(following)
  return reply('tasks', ctx.state.revision, ctx.now, ctx.policy.lease_ttl_ms, tasks, following)
end

-- Up to `count` entries of a sorted set after (score, sequence), or from its beginning; calls visit(member, score).
-- Returns how many, and the last one's score and sequence.
local function each_entry(at, score, sequence, count, visit)
  local first = score and Inspecting.rank_after(at, score, sequence) or 0
  local flat = call('ZRANGE', at, first, first + count - 1, 'WITHSCORES')
  for index = 1, #flat, 2 do
    score = tonumber(flat[index + 1])
    sequence = tonumber(string.sub(flat[index], 1, 15))
    visit(flat[index], score)
  end
  return #flat / 2, score, sequence
end

local function list_pending()
  local left, due, last, score, sequence = limit, after[1] == 1, after[2], after[3], after[4]
  local seen
  if not due then
    seen, score, sequence = each_entry(key('delayed'), score, sequence, left, function(member, not_before)
      add(Tasks.id_of_entry(member), not_before, -1)
    end)
    left = left - seen
    if left == 0 then
      return {0, '', score, sequence}
    end
    last = nil
  end
  local names, indexes = {}, Picking.environment_indexes()
  for name in pairs(Pending.names(ctx)) do
    if (is_filtered == 0 or name == environment) and (not last or indexes[name] >= (indexes[last] or 0)) then
      names[#names + 1] = name
    end
  end
  table.sort(names, function(one, two)
    return indexes[one] < indexes[two]
  end)
  for _, name in ipairs(names) do
    if name ~= last then
      score, sequence = nil, nil
    end
    seen, score, sequence = each_entry(Pending.key_of(name), score, sequence, left, function(member)
      add(Tasks.id_of_entry(member), -1, -1)
    end)
    left = left - seen
    if left == 0 then
      return {1, name, score, sequence}
    end
  end
  return {}
end

local function list_leased()
  local scanned
  if worker_id ~= '' then
    scanned = call('SSCAN', key('held:' .. worker_id), after[1] or '0', 'COUNT', limit)
    for _, member in ipairs(scanned[2]) do
      local expiry = call('ZSCORE', key('leases'), member)
      -- The others are of evaluations.
      if expiry then
        add(Tasks.id_of_entry(member), -1, tonumber(expiry))
      end
    end
  else
    scanned = call('ZSCAN', key('leases'), after[1] or '0', 'COUNT', limit)
    for index = 1, #scanned[2], 2 do
      add(Tasks.id_of_entry(scanned[2][index]), -1, tonumber(scanned[2][index + 1]))
    end
  end
  return scanned[1] ~= '0' and {scanned[1]} or {}
end

local function list_ended()
  local below = after[1] and format('(%d', after[1]) or '+inf'
  local flat = call('ZREVRANGEBYSCORE', key('ended'), below, '-inf', 'WITHSCORES', 'LIMIT', 0, limit)
  for index = 1, #flat, 2 do
    add(flat[index], -1, -1)
  end
  return #flat == 2 * limit and {tonumber(flat[#flat])} or {}
end

if set == 'pending' then
  return answer(list_pending())
elseif set == 'leased' then
  return answer(list_leased())
elseif set == 'ended' then
  return answer(list_ended())
end
return error('unknown set of tasks: ' .. set)
