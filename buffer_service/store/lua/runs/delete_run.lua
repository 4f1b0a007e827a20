-- Deletes a run with everything it has, in portions. Its record is renamed first, so that nobody finds the run from
-- then on; what is left is found under the new name, by whoever goes on.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {begin}: 1 begins to delete, 0 only goes on
-- Replies {'more'}: empty the trash and call again | {'deleted'}
--       | {'error', 'unknown_run'}: there is no such run (any more)
-- Complexity O(256 groups and tasks); the last call O(subqueues + workers)

-- @include blocks
-- @include burial
-- @include record

local request = unpack_msg(ARGV[1])
local VICTIMS = 256

local DELETING, TRASH = key('deleting'), key('trash')

call('HDEL', DELETING, '')
if request[1] == 1 and call('EXISTS', RUN) == 1 then
  Run.check_layout(call('HGET', RUN, 'layout'))
  call('RENAME', RUN, DELETING)
  call('PUBLISH', key('notify'), 'evaluations,groups,results,space,stages,tasks,weights')
end
if call('EXISTS', DELETING) == 0 then
  return refuse('unknown_run')
end
Run.check_layout(call('HGET', DELETING, 'layout'))

local left = VICTIMS

-- Calls each(members) with portions of a sorted set, which leave it.
local function empty_sorted_set(at, each)
  while left > 0 do
    local members = call('ZRANGE', at, 0, left - 1)
    if #members == 0 then
      return
    end
    each(members)
    call('ZREMRANGEBYRANK', at, 0, #members - 1)
    left = left - #members
  end
end

local function trash_all(payloads)
  call_many('SADD', TRASH, payloads)
end

-- All payloads of groups: their own, and what stages have added.
local function trash_groups(groups)
  local payloads = {}
  for _, group in ipairs(groups) do
    for _, payload in ipairs(Record.payloads(group)) do
      payloads[#payloads + 1] = payload
    end
  end
  trash_all(payloads)
end

local function empty_subqueue(name)
  empty_sorted_set(key('q:' .. name), function(members)
    for _, block in ipairs(Blocks.of(members)) do
      local groups = {}
      for _, raw in ipairs(call('HMGET', block.key, unpack(block.members))) do
        if raw then
          groups[#groups + 1] = unpack_msg(raw)
        end
      end
      trash_groups(groups)
      call_many('HDEL', block.key, block.members)
    end
  end)
end

local function empty_chunks()
  while left > 0 do
    local fields = call('HRANDFIELD', key('chunks'), 8)
    if #fields == 0 then
      return
    end
    for _, chunk in ipairs(call('HMGET', key('chunks'), unpack(fields))) do
      local groups = unpack_msg(chunk)
      trash_groups(groups)
      left = left - #groups - 1
    end
    call('HDEL', key('chunks'), unpack(fields))
  end
end

-- Portions of a micro-batch (Gathering): all fields but two.
local function empty_gathered()
  local portion = call('HLEN', key('gathered')) - 2
  while left > 0 and portion > 0 do
    local field, groups = format('%d', portion), {}
    for index, raw in ipairs(unpack_msg(call('HGET', key('gathered'), field))[4]) do
      groups[index] = unpack_msg(raw)
    end
    trash_groups(groups)
    call('HDEL', key('gathered'), field)
    left, portion = left - #groups - 1, portion - 1
  end
end

-- What was trained and may be used again, or is.
local function empty_kept()
  while left > 0 do
    local fields, groups = call('HRANDFIELD', key('kept'), left), {}
    if #fields == 0 then
      return
    end
    for index, raw in ipairs(call('HMGET', key('kept'), unpack(fields))) do
      groups[index] = unpack_msg(raw).group
    end
    trash_groups(groups)
    call('HDEL', key('kept'), unpack(fields))
    left = left - #fields
  end
end

-- Partial rollouts of open tasks.
local function empty_tasks(at)
  empty_sorted_set(at, function(members)
    local ids, payloads = {}, {}
    for index, member in ipairs(members) do
      ids[index] = string.sub(member, 16)
    end
    for _, raw in ipairs(call('HMGET', key('tasks'), unpack(ids))) do
      local payload = raw and unpack_msg(raw).payload or ''
      if payload ~= '' then
        payloads[#payloads + 1] = payload
      end
    end
    trash_all(payloads)
  end)
end

local subqueues = call('HKEYS', key('subqueues'))
local environments = call('HKEYS', key('pending_environments'))
for _, name in ipairs(subqueues) do
  empty_subqueue(name)
end
empty_chunks()
empty_gathered()
empty_kept()
for _, environment in ipairs(environments) do
  empty_tasks(key('pending:' .. environment))
end
empty_tasks(key('delayed'))
empty_tasks(key('leases'))
empty_sorted_set(key('waiting'), trash_all)
empty_sorted_set(key('staging'), trash_all)
for _, raw in ipairs(call('HVALS', key('evals'))) do
  call('SADD', key('eval_deleting'), format('%d', unpack_msg(raw).number))
end
call('UNLINK', key('evals'))
if left > 0 then
  left = left - Burial.bury(left)
end
if left <= 0 or call('EXISTS', TRASH) == 1 then
  return reply('more')
end

-- No payload is left: the indexes go at once, and with them the name under which they were found.
local names = {
  'subqueues', 'environments', 'env_ledger', 'env_work', 'response_lengths', 'snapshots', 'steps', 'micro_batches',
  'chunks', 'rejected', 'gathered', 'tasks', 'specs', 'delayed', 'leases', 'lease_heads', 'lease_turns',
  'pending_environments', 'waiting', 'staging', 'workers', 'workers_heard', 'engines', 'engines_heard',
  'engine_counters', 'engine_reloads', 'load_lags', 'permits', 'permit_line', 'ended', 'failures', 'remembered',
  'manifests', 'commits', 'record', 'eval_open', 'eval_leases', 'eval_manifests', 'relaying', 'weights_from', 'blobs',
  'engine_samples', 'stages', 'stage_held', 'stage_leases', 'stage_workers', 'kept', 'reusable', 'test_now', 'deleting',
}
for _, name in ipairs(subqueues) do
  names[#names + 1] = 'q:' .. name
  names[#names + 1] = 'a:' .. name
end
for _, environment in ipairs(environments) do
  names[#names + 1] = 'pending:' .. environment
end
for _, worker in ipairs(call('HKEYS', key('workers'))) do
  names[#names + 1] = 'held:' .. worker
end
for index, name in ipairs(names) do
  names[index] = key(name)
end
for first = 1, #names, 1000 do
  call('UNLINK', unpack(names, first, math.min(first + 999, #names)))
end
return reply('deleted')
