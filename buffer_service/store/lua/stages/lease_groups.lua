-- Leases groups that wait in a stage to a worker of it, in the order in which batches would take them.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, stage, worker_id, instance_id, request_id, max_groups}
-- Replies {'leased', revision, ttl_ms, term, version, waiting, grants, paused (the reason, or '')}; a grant is
--         {lease_id, group id, sequence, head, tail, payload key, added}; added: {stage, payload key} each
--       | {'error', 'unknown_run' | 'store_rolled_back', ...}
-- Complexity O(subqueues + max_groups * log queued); for a worker's new process O(leased)

-- @include stages

local ctx = Run.context()
local seen, stage, worker_id, instance_id, request_id, max_groups = unpack(unpack_msg(ARGV[1]), 1, 6)

Run.relieve()
local refusal = Run.open(ctx, seen)
if refusal then
  return refusal
end
local state, policy = ctx.state, ctx.policy
Stages.expire(ctx, 100)

local function answer(grants)
  local waiting = 0
  Queue.count(ctx)
  for _, subqueue in ipairs(Queue.subqueues_in(ctx, stage)) do
    waiting = waiting + subqueue.count
  end
  return reply('leased', Run.close(ctx), policy.lease_ttl_ms, state.term, state.version, waiting, grants,
    state.paused)
end

if not Stages.is_named(ctx, stage) then
  return answer({})
end
Stages.note(stage, 0, 0, 0, ctx.now)

-- The worker's process and its last request that was granted something, with {member, number} of each.
local place = stage .. '/' .. worker_id
local raw = call('HGET', key('stage_workers'), place)
local worker = raw and unpack_msg(raw) or {'', '', {}}

local function grant_of(group, number)
  return {format('%s/%s:%d', group[G_ID], stage, number), group[G_ID], group[G_SEQUENCE], group[G_HEAD],
    group[G_TAIL], group[G_PAYLOAD], group[G_ADDED]}
end

if worker[1] ~= instance_id then
  local holding, flat = {}, call('HGETALL', key('stage_held'))
  for index = 1, #flat, 2 do
    local held = unpack_msg(flat[index + 1])
    if held[2] == stage and held[3] == worker_id then
      Stages.give_up(ctx, flat[index], held, false)
    else
      holding[held[2] .. '/' .. held[3]] = true
    end
  end
  Stages.forget_workers(holding)
  worker = {instance_id, '', {}}
  call('HSET', key('stage_workers'), place, pack(worker))
elseif worker[2] == request_id then
  local grants = {}
  for _, given in ipairs(worker[3]) do
    local kept = call('HGET', key('stage_held'), given[1])
    if kept and unpack_msg(kept)[1] == given[2] and Stages.live_expiry(ctx, given[1]) then
      grants[#grants + 1] = grant_of(Stages.load_group(ctx, given[1]), given[2])
    end
  end
  return answer(grants)
end
if state.paused ~= '' then
  return answer({})
end

local sources = Queue.subqueue_sources(ctx, Queue.subqueues_in(ctx, stage), policy.order)
local members, grants, given = Picking.first_members(sources, max_groups), {}, {}
for index, group in ipairs(Queue.load(ctx, Blocks.of(members))) do
  local number = Stages.grant(ctx, group, members[index], stage, worker_id, instance_id)
  grants[index], given[index] = grant_of(group, number), {members[index], number}
end
if #grants > 0 then
  call('HSET', key('stage_workers'), place, pack({instance_id, request_id, given}))
end
return answer(grants)
