-- Admission, as in domain/admission.py.

-- @include timeline
-- @include tasks
-- @include queue

local Admission = {}

-- What exists: groups that are queued, leased and in the open step, how many groups make that step, and how many
-- complete ones still lack for rejected ones.
function Admission.existing(ctx)
  local state = ctx.state
  local found = {
    queued = Queue.total(ctx), leased = call('ZCARD', key('leases')), forming = 0, size = ctx.policy.batch_groups,
    missing = state.missing or 0,
  }
  if state.micro_batches > 0 then
    local open = unpack_msg(call('HGET', key('steps'), format('%d', state.next_step)))
    found.size, found.forming = math.max(found.size, open.target), open.groups
  end
  return found
end

-- Thousandths of a version ahead for an engine that is so many behind the published one.
function Admission.lookahead(ctx, behind)
  local policy = ctx.policy
  local ahead = policy.lookahead_milli or 1000 * policy.max_lookahead
  local gated = policy.max_staleness >= 0 and policy.staleness_measure == 'head'
  if behind > 0 and gated and policy.order ~= 'lifo' then
    return math.min(ahead, 1000 * (policy.max_staleness - behind))
  end
  return ahead
end

-- Groups that may still be leased for such an engine.
function Admission.room(ctx, exists, behind)
  local state, policy = ctx.state, ctx.policy
  local room = math.huge
  if policy.max_inflight_groups > 0 then
    room = math.min(room, policy.max_inflight_groups - exists.leased)
  end
  if policy.reserve_queue_space ~= 0 then
    room = math.min(room, policy.max_queued_groups - (exists.queued + exists.leased))
  end
  if policy.max_lookahead >= 0 then
    local unpublished = state.next_step - state.published_steps
    local steps = (Admission.lookahead(ctx, behind) + 1000) * policy.batches_per_publish - 1000 * unpublished
    local more = exists.missing - (exists.forming + exists.queued + exists.leased)
    room = math.min(room, floor(steps * exists.size / 1000) + more)
  end
  return math.max(0, room)
end

-- Notes for the controller that what it lowered holds an engine back which got so many leases: the policy as stated
-- would let it have more.
function Admission.note_held(ctx, exists, granted)
  local lowered, version = ctx.policy, format('%d', ctx.state.version)
  ctx.policy = ctx.stated
  if Admission.room(ctx, exists, 0) > granted and call('HGET', RUN, 'held') ~= version then
    call('HSET', RUN, 'held', version)
  end
  ctx.policy = lowered
end

-- The oldest weights with which one group after `groups` others may be started, at most the published ones. Those that
-- complete steps lack come first.
function Admission.required_version(ctx, exists, groups)
  local state, policy = ctx.state, ctx.policy
  local steps = state.next_step - state.published_steps + floor(math.max(0, groups - exists.missing) / exists.size)
  local turn = state.version + floor(steps / policy.batches_per_publish)
  return math.min(state.version, math.max(0, turn - policy.max_staleness))
end
