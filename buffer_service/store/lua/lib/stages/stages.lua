-- Stages that groups pass on their way to the trainer: the policy's list `stages`. A group is in one at a time, the
-- first of them that has not added anything to it. Its place in the queue and its room there it has meanwhile (Queue).
-- Workers lease it there, and push what they add.
--
-- Hash `stages`: by name {added, failed, busy_ms, asked_ms (-1: never), passed_over, added_bytes (absent: 0)}; see
-- StageState.
-- state.stage_leases: leases of stages so far, absent for none, which number them. Hash `stage_held`: by member of the
-- queue {number, stage, worker, instance, granted (ms), group id}, of those that are leased. Sorted set `stage_leases`
-- (score: expiry): the same members. A lease is "task_id/incarnation/stage:number". Hash `stage_workers`: see
-- lease_groups.lua. A task's record has, beside what Tasks says, `added`: by stage {number, payload key} of what its
-- accepted group got there, absent before.

-- @include accepted
-- @include filters
-- @include groups

local Stages = {}

-- The stage that writes rewards.
Stages.REWARDS = 'rewards'

-- The name of a stage as G_STAGE has it.
function Stages.name_of(stage)
  return stage and string.match(stage, '^[^*]*') or nil
end

function Stages.is_named(ctx, name)
  for _, named in ipairs(ctx.policy.stages) do
    if named == name then
      return true
    end
  end
  return false
end

-- Adds to what is noted of a stage.
function Stages.note(name, added, failed, busy_ms, asked_ms, passed_over, added_bytes)
  local raw = call('HGET', key('stages'), name)
  local noted = raw and unpack_msg(raw) or {0, 0, 0, -1}
  noted[1], noted[2], noted[3] = noted[1] + added, noted[2] + failed, noted[3] + busy_ms
  noted[4], noted[5] = asked_ms or noted[4], (noted[5] or 0) + (passed_over or 0)
  noted[6] = (noted[6] or 0) + (added_bytes or 0)
  call('HSET', key('stages'), name, pack(noted))
end

-- States of the stages: {name, waiting, leased, added, failed, busy_ms, asked_ms (-1: never), passed_over,
-- added_bytes}, those of the policy in its order, then others that groups are in or have gone on from without columns.
function Stages.states(ctx)
  local waiting, leased, names, known = {}, {}, {}, {}
  local function know(name)
    if not known[name] then
      known[name], names[#names + 1] = true, name
    end
  end
  -- A run of a service of 0.1.0 may be looked at before it has the field.
  for _, name in ipairs(ctx.policy.stages or {}) do
    know(name)
  end
  Queue.count(ctx)
  local others = {}
  for _, subqueue in ipairs(Queue.load_subqueues(ctx)) do
    local name = Stages.name_of(subqueue.stage)
    if name and subqueue.count > 0 then
      local counts = name == subqueue.stage and waiting or leased
      counts[name], others[#others + 1] = (counts[name] or 0) + subqueue.count, name
    end
  end
  local noted, flat = {}, call('HGETALL', key('stages'))
  for index = 1, #flat, 2 do
    local note = unpack_msg(flat[index + 1])
    noted[flat[index]], note[5], note[6] = note, note[5] or 0, note[6] or 0
    others[#others + 1] = note[5] > 0 and flat[index] or nil
  end
  table.sort(others)
  for _, name in ipairs(others) do
    know(name)
  end
  local states = {}
  for index, name in ipairs(names) do
    states[index] = {name, waiting[name] or 0, leased[name] or 0, unpack(noted[name] or {0, 0, 0, -1, 0, 0})}
  end
  return states
end

-- Whether a lease's id is of a stage: no other has a colon behind its last slash.
function Stages.has_lease(lease_id)
  return string.find(lease_id, ':[^/]*$') ~= nil and string.find(lease_id, '/', 1, true) ~= nil
end

-- Task, incarnation, stage and number of a lease's id; nil when malformed.
function Stages.parse(lease_id)
  local task_id, incarnation, stage, number = string.match(lease_id, '^([^/]+)/(%d+)/([a-z0-9_]+):([1-9]%d*)$')
  if not task_id or #incarnation > 15 or #number > 15 or string.match(incarnation, '^0%d') then
    return nil
  end
  return task_id, tonumber(incarnation), stage, tonumber(number)
end

-- The member and the lease of an id that is held, and by this worker's process where one is named; nil for one that is
-- not, or not any more.
function Stages.find(task, lease_id, worker, instance)
  local _, incarnation, stage, number = Stages.parse(lease_id)
  if not incarnation or not task or task.incarnation ~= incarnation or not task.group then
    return nil
  end
  local member = Blocks.member_of(task.group)
  local raw = call('HGET', key('stage_held'), member)
  local held = raw and unpack_msg(raw)
  if held and held[1] == number and held[2] == stage and (not worker or held[3] == worker and held[4] == instance) then
    return member, held
  end
  return nil
end

function Stages.load_group(ctx, member)
  Run.write_kept_back(ctx)
  return Queue.load(ctx, Blocks.of({member}))[1]
end

-- A group goes on from its stage: to the next one, or to those that batches may take.
function Stages.advance(ctx, group, member)
  local following, tokens = Groups.following_stage(ctx, group), Queue.tokens(ctx)
  group[G_TRIES] = 0
  Queue.move(ctx, group, member, following)
  if following then
    ctx.topics.stages = true
  else
    Groups.hint(ctx, tokens, group)
  end
end

-- A queued group has the bytes of its columns too, from now on. No cap refuses them: without them it would never leave.
function Stages.grow(ctx, group, pushed)
  local bytes = pushed[P_SIZE_BYTES]
  Ledger.move_groups(ctx, 'new', 'queued', group[G_ENVIRONMENT], 0, 0, 0, bytes)
  group[G_BYTES] = group[G_BYTES] + bytes
  if pushed[P_STORED] == 1 then
    Run.count(ctx, 'written_bytes', bytes)
  end
end

-- Ends a group that is in a stage.
function Stages.finish(ctx, group, member, to)
  Queue.remove(ctx, {group}, {member}, Blocks.of({member}), nil)
  Groups.finish(ctx, group, 'queued', to)
end

-- A lease ends without columns. One that failed counts, and with the last one that a stage may have the group ends:
-- returns true then.
function Stages.give_up(ctx, member, held, failed)
  local group = Stages.load_group(ctx, member)
  if failed then
    group[G_TRIES] = group[G_TRIES] + 1
    Stages.note(held[2], 0, 1, 0)
    if group[G_TRIES] >= ctx.policy.max_attempts then
      Stages.finish(ctx, group, member, 'discarded')
      return true
    end
  end
  Queue.move(ctx, group, member, held[2])
  ctx.topics.stages = true
  return false
end

-- Ends leases that are past their expiry, at most `limit`; returns how many.
function Stages.expire(ctx, limit)
  local due = call('ZRANGEBYSCORE', key('stage_leases'), '-inf', format('(%d', ctx.now), 'LIMIT', 0, limit)
  for _, member in ipairs(due) do
    Stages.give_up(ctx, member, unpack_msg(call('HGET', key('stage_held'), member)), true)
  end
  return #due
end

-- Expiry of a lease that is held and not past it, else nil.
function Stages.live_expiry(ctx, member)
  local expiry = tonumber(call('ZSCORE', key('stage_leases'), member))
  return expiry >= ctx.now and expiry or nil
end

-- Gives a group that waits in a stage to a worker's process; returns the number of its lease.
function Stages.grant(ctx, group, member, stage, worker, instance)
  local state = ctx.state
  local number = (state.stage_leases or 0) + 1
  state.stage_leases = number
  Queue.move(ctx, group, member, stage .. '*')
  call('HSET', key('stage_held'), member, pack({number, stage, worker, instance, ctx.now, group[G_ID]}))
  call('ZADD', key('stage_leases'), format('%d', ctx.now + ctx.policy.lease_ttl_ms), member)
  return number
end

-- Workers that are remembered though they hold nothing: of these a repeated request is answered with nothing.
Stages.REMEMBERED_WORKERS = 256

-- Forgets the workers of stages that hold nothing, once they are many. `holding`: {place in `stage_workers` = true}.
function Stages.forget_workers(holding)
  local workers, idle = key('stage_workers'), {}
  if call('HLEN', workers) < Stages.REMEMBERED_WORKERS then
    return
  end
  for _, place in ipairs(call('HKEYS', workers)) do
    if not holding[place] then
      idle[#idle + 1] = place
    end
  end
  call_many('HDEL', workers, idle)
end

-- Groups of stages that `named` does not name go on, as ctx.policy says, at most `limit`; returns how many.
function Stages.leave_unnamed(ctx, named, limit)
  local names, done = {}, 0
  for _, name in ipairs(named) do
    names[name] = true
  end
  for _, subqueue in ipairs(Queue.load_subqueues(ctx)) do
    local name = Stages.name_of(subqueue.stage)
    if name and not names[name] then
      for _, member in ipairs(call('ZRANGE', subqueue.q, 0, limit - done - 1)) do
        Stages.advance(ctx, Stages.load_group(ctx, member), member)
        Stages.note(name, 0, 0, 0, nil, 1)
        done = done + 1
      end
      if done == limit then
        return done
      end
    end
  end
  return done
end

-- Rewards that a stage has written take the place of the group's. The statistic of the filter that they meet, or nil.
function Stages.score(ctx, group, pushed)
  local responses, reward = group[G_RESPONSES], pushed[P_REWARD_MILLI]
  local tokens, longest, before, turns, truncated, place = struct.unpack(Record.RESPONSES, responses)
  Totals.count(ctx, 'accepted_reward_milli', reward - before)
  group[G_RESPONSES] = struct.pack(Record.RESPONSES, tokens, longest, reward, turns, truncated)
    .. string.sub(responses, place)
  Run.record(ctx, 'rewarded', {ctx.now, group[G_ID], pushed[P_REWARDS], pushed[P_TRAJECTORY_REWARDS]})
  return Filters.ended_by(ctx.policy, pushed, 'rewards')
end

-- What becomes of columns that are pushed for a stage: 'added' | 'filtered' | 'duplicate' | 'closed' |
-- 'unknown_lease' | an answer of `missing`, or {field, value, limit}. And true when an earlier call took this payload.
-- `missing`: see push.lua.
function Stages.take(ctx, pushed, missing)
  local payload = pushed[P_PAYLOAD]
  local task_id, incarnation, stage, number = Stages.parse(pushed[P_LEASE_ID])
  if not task_id or number > (ctx.state.stage_leases or 0) then
    return 'unknown_lease'
  elseif pushed[P_TASK_ID] ~= task_id or pushed[P_INCARNATION] ~= incarnation then
    return {'lease_id', pushed[P_LEASE_ID], 'task_id/incarnation/stage:number of this group'}
  end
  local task = ctx.tasks[task_id]
  local done = task and task.incarnation == incarnation and task.added and task.added[stage]
  if done and done[1] == number then
    if done[2] == payload then
      return task.filtered and 'filtered' or 'added', true
    end
    return 'duplicate'
  end
  local member, held = Stages.find(task, pushed[P_LEASE_ID])
  if not member then
    return 'closed'
  end
  local group = Stages.load_group(ctx, member)
  if pushed[P_SAMPLES] ~= group[G_SAMPLES] then
    return {'samples', format('%d', pushed[P_SAMPLES]), format('%d, those of the group', group[G_SAMPLES])}
  elseif pushed[P_TOKENS] ~= group[G_TOKENS] then
    return {'tokens', format('%d', pushed[P_TOKENS]), format('%d, those of the group', group[G_TOKENS])}
  end
  local lacking = missing(pushed)
  if lacking then
    return lacking
  end
  task.added = task.added or {}
  task.added[stage] = {number, payload}
  Stages.note(stage, 1, 0, ctx.now - held[5], nil, nil, pushed[P_SIZE_BYTES])
  local filter = nil
  if stage == Stages.REWARDS then
    filter = Stages.score(ctx, group, pushed)
    if ctx.has_filter then
      Accepted.follow(ctx, not filter)
    end
  end
  ctx.changed = true
  if filter then
    task.filtered = true
    Run.count(ctx, filter, 1)
    Stages.finish(ctx, group, member, 'filtered')
  else
    group[G_ADDED][#group[G_ADDED] + 1] = {stage, payload}
    Stages.grow(ctx, group, pushed)
    Stages.advance(ctx, group, member)
  end
  Run.keep_back(ctx, 'HSET', key('tasks'), task_id, pack(task))
  return filter and 'filtered' or 'added'
end
