-- The queued groups' records and the indexes over them.
--
-- A group's member is its sequence in fixed width. Its record is under the member in a block (Blocks). Groups
-- that leave together mostly came together, so a pull reads and removes records in a few small hashes. One hash of all
-- records would cost it two accesses a group to memory that no cache holds, and more while that hash grows or shrinks.
--
-- A subqueue is an environment and a priority, and of groups in a stage (Stages) the stage too, as G_STAGE says it.
-- Batches take nothing of those. Each has two sorted sets of members: `q:<priority>:<environment>`
-- (score: sequence) and `a:<priority>:<environment>` (score: age by the policy's measure; equal ages go by sequence).
-- Hash `subqueues` names those that are not empty.
--
-- ctx.subqueues, subqueue_by: subqueues that this call has met, in a list, and by environment and priority;
-- all_subqueues: true once these are all; queued, staged: groups that batches may take, those in stages; window: the
-- sequence from which on no group may be taken, nil for none (MicroBatches).

-- @include record
-- @include blocks
-- @include picking

local Queue = {}

-- Unnames the subqueues that have become empty.
function Queue.unname_empty(ctx)
  for _, subqueue in ipairs(ctx.subqueues) do
    if subqueue.left and subqueue.count == 0 then
      call('HDEL', key('subqueues'), subqueue.name)
    end
  end
end

-- The subqueue of an environment and a priority, and of a stage where it is not nil, which is made where this call has
-- not met it.
function Queue.subqueue_of(ctx, environment, priority, stage)
  if not ctx.subqueues then
    ctx.subqueues, ctx.subqueue_by = {}, {}
    ctx.before_close[#ctx.before_close + 1] = Queue.unname_empty
  end
  local subqueue_by = ctx.subqueue_by
  local by_priority, at = subqueue_by[environment], priority
  if stage then
    at = format('%s|%d', stage, priority)
  end
  local subqueue = by_priority and by_priority[at]
  if subqueue then
    return subqueue
  end
  local name = (stage and stage .. '|' or '') .. format('%d:', priority) .. environment
  subqueue = {
    name = name, stored = false, left = false, q = key('q:' .. name), a = key('a:' .. name),
    priority = priority, environment = environment, stage = stage,
    -- Groups that it has, as of Queue.count.
    count = 0,
    -- The oldest group's member: nil when not known, false when there is none.
    oldest = nil,
  }
  subqueue_by[environment] = by_priority or {}
  subqueue_by[environment][at] = subqueue
  ctx.subqueues[#ctx.subqueues + 1] = subqueue
  return subqueue
end

-- The subqueues that are not empty. Whatever reads the queue begins here, and finds what this call has added.
function Queue.load_subqueues(ctx)
  Run.write_kept_back(ctx)
  if not ctx.all_subqueues then
    ctx.all_subqueues = true
    for _, name in ipairs(call('HKEYS', key('subqueues'))) do
      local stage = string.match(name, '^([a-z0-9_]+%*?)|')
      local first = stage and #stage + 2 or 1
      local colon = string.find(name, ':', first, true)
      local environment, priority = string.sub(name, colon + 1), tonumber(string.sub(name, first, colon - 1))
      Queue.subqueue_of(ctx, environment, priority, stage).stored = true
    end
  end
  return ctx.subqueues or {}
end

-- Queued groups that batches may take, counted from what exists, with those that are gathered for a micro-batch
-- (Gathering).
function Queue.count(ctx)
  local state = ctx.state
  if not ctx.queued then
    local queued, staged = 0, 0
    for _, subqueue in ipairs(Queue.load_subqueues(ctx)) do
      subqueue.count = call('ZCARD', subqueue.q)
      if subqueue.stage then
        staged = staged + subqueue.count
      else
        queued = queued + subqueue.count
      end
    end
    ctx.queued, ctx.staged = queued, staged
  end
  return ctx.queued + (state.gathered and state.gathered[GATHERED_GROUPS] or 0)
end

-- All queued groups, those in stages too.
function Queue.total(ctx)
  return Queue.count(ctx) + ctx.staged
end

-- Tokens of the queued groups that batches may take; state.staged_tokens are those of groups in stages, absent for
-- none.
function Queue.tokens(ctx)
  return ctx.ledger.groups.queued[A_TOKENS] - (ctx.state.staged_tokens or 0)
end

-- Counts groups of so many tokens into a subqueue, or out of it.
function Queue.note(ctx, subqueue, groups, tokens)
  local state = ctx.state
  subqueue.count = subqueue.count + groups
  if subqueue.stage then
    local staged = (state.staged_tokens or 0) + tokens
    ctx.staged, state.staged_tokens, ctx.changed = ctx.staged + groups, staged > 0 and staged or nil, true
  else
    ctx.queued = ctx.queued + groups
  end
end

-- Writes a record into the queue. It must be of the present timeline.
function Queue.add(ctx, group)
  local subqueue = Queue.subqueue_of(ctx, group[G_ENVIRONMENT], group[G_PRIORITY], group[G_STAGE] or nil)
  Queue.count(ctx)
  if not subqueue.stored then
    subqueue.stored = true
    Run.keep_back(ctx, 'HSET', key('subqueues'), subqueue.name, 1)
  end
  local member = Blocks.member_of(group[G_SEQUENCE])
  Run.keep_back(ctx, 'HSET', Blocks.key_of(Blocks.name_of(member)), member, pack(group))
  Run.keep_back(ctx, 'ZADD', subqueue.q, format('%d', group[G_SEQUENCE]), member)
  Run.keep_back(ctx, 'ZADD', subqueue.a, format('%d', Record.age_of(ctx, group)), member)
  if subqueue.oldest == false or subqueue.oldest and member < subqueue.oldest then
    subqueue.oldest = nil
  end
  Queue.note(ctx, subqueue, 1, group[G_TOKENS])
end

-- The members of groups by subqueue; tokens: of those in a stage.
function Queue.split_by_subqueue(ctx, groups, members)
  local by_subqueue, subqueue, count = {}, nil, 0
  for index = 1, #groups do
    local group = groups[index]
    local environment, priority = group[G_ENVIRONMENT], group[G_PRIORITY]
    local stage = group[G_STAGE] or nil
    if not subqueue or subqueue.environment ~= environment or subqueue.priority ~= priority
      or subqueue.stage ~= stage then
      subqueue = Queue.subqueue_of(ctx, environment, priority, stage)
      by_subqueue[subqueue] = by_subqueue[subqueue] or {tokens = 0}
      count = #by_subqueue[subqueue]
    end
    count = count + 1
    by_subqueue[subqueue][count] = members[index]
    if stage then
      by_subqueue[subqueue].tokens = by_subqueue[subqueue].tokens + group[G_TOKENS]
    end
  end
  return by_subqueue
end

-- Takes records, with their members and blocks, out of the queue. Of their subqueues they are the first ones in this
-- order; nil: any. What a stage's worker holds is lost to it.
function Queue.remove(ctx, groups, members, blocks, order)
  local topics = ctx.topics
  if #groups == 0 then
    return
  end
  Queue.count(ctx)
  for _, block in ipairs(blocks) do
    call_many('HDEL', block.key, block.members)
  end
  for subqueue, leaving in pairs(Queue.split_by_subqueue(ctx, groups, members)) do
    local ordered, other, count = subqueue.q, subqueue.a, #leaving
    if order == 'stalest_first' then
      ordered, other = other, ordered
    end
    if not order then
      call_many('ZREM', ordered, leaving)
    elseif order == 'lifo' then
      call('ZREMRANGEBYRANK', ordered, -count, -1)
    else
      call('ZREMRANGEBYRANK', ordered, 0, count - 1)
    end
    call_many('ZREM', other, leaving)
    if subqueue.stage then
      call_many('HDEL', key('stage_held'), leaving)
      call_many('ZREM', key('stage_leases'), leaving)
    end
    subqueue.left, subqueue.oldest = true, nil
    Queue.note(ctx, subqueue, -count, -leaving.tokens)
  end
  topics.space, topics.tasks = true, true
end

-- A queued group goes to another stage, or (nil) to those that batches may take. Whoever held it holds it no more.
function Queue.move(ctx, group, member, stage)
  Run.write_kept_back(ctx)
  local topics = ctx.topics
  local space, tasks = topics.space, topics.tasks
  Queue.remove(ctx, {group}, {member}, {}, nil)
  -- It takes as much room as before.
  topics.space, topics.tasks = space, tasks
  group[G_STAGE] = stage or false
  Queue.add(ctx, group)
end

-- Records of queued groups, in the order of their members, of which these are the blocks.
function Queue.load(ctx, blocks)
  local groups = {}
  for _, block in ipairs(blocks) do
    local places = block.places
    for index, raw in ipairs(call('HMGET', block.key, unpack(block.members))) do
      groups[places[index]] = Record.unpack(ctx, raw)
    end
  end
  return groups
end

-- Groups that are queued within ctx.window, and the first sequence that is not, nil for none.
function Queue.split_by_window(ctx)
  local within, beyond = 0, nil
  for _, subqueue in ipairs(Queue.subqueues_in(ctx, nil)) do
    local count = Queue.takeable(ctx, subqueue)
    within = within + count
    local first = call('ZRANGE', subqueue.q, count, count)[1]
    if first and (not beyond or tonumber(first) < beyond) then
      beyond = tonumber(first)
    end
  end
  return within, beyond
end

-- The subqueues of a stage; nil: those that batches may take of.
function Queue.subqueues_in(ctx, stage)
  local subqueues = {}
  for _, subqueue in ipairs(Queue.load_subqueues(ctx)) do
    if subqueue.stage == stage then
      subqueues[#subqueues + 1] = subqueue
    end
  end
  return subqueues
end

-- Groups of a subqueue that may be taken.
function Queue.takeable(ctx, subqueue)
  return ctx.window and call('ZCOUNT', subqueue.q, '-inf', format('(%d', ctx.window)) or subqueue.count
end

function Queue.by_sequence(_, _, score)
  return score
end

function Queue.by_reversed_sequence(_, _, score)
  return -score
end

function Queue.by_age(_, member, score)
  return score, tonumber(member)
end

function Queue.by_priority(source, _, score)
  return -source.effective, -source.own, score
end

-- Sources for picking from subqueues in an order of the policy.
function Queue.subqueue_sources(ctx, subqueues, order)
  local sources = {}
  for index, subqueue in ipairs(subqueues) do
    local source = {
      at = subqueue.q, environment = subqueue.environment, size = Queue.takeable(ctx, subqueue),
      rank = Queue.by_sequence,
    }
    if order == 'lifo' then
      source.reversed, source.rank = true, Queue.by_reversed_sequence
    elseif order == 'stalest_first' then
      source.at, source.rank = subqueue.a, Queue.by_age
    elseif order == 'priority' then
      source.rank, source.own = Queue.by_priority, subqueue.priority
      source.effective = Picking.priority_of(ctx, subqueue.environment, subqueue.priority)
    elseif order ~= 'fifo' and order ~= 'submission' then
      error('unknown order ' .. order)
    end
    sources[index] = source
  end
  return sources
end

-- Takes up to `count` groups out of the queue, by the policy's order and shares; fewer when their tokens would exceed
-- `budget_tokens` (nil: no budget) or their number is no multiple of `multiple`, but `least` in any case. Returns their
-- records in the order in which they were picked; the ledger is the caller's to move.
function Queue.take(ctx, count, budget_tokens, multiple, least)
  local order = ctx.policy.order
  Queue.count(ctx)
  local sources = Queue.subqueue_sources(ctx, Queue.subqueues_in(ctx, nil), order)
  local members, picking = Picking.pick(ctx, sources, 'queue_stride', count)
  local blocks = Blocks.of(members)
  local groups = Queue.load(ctx, blocks)
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
    blocks = Blocks.of(members)
  end
  Picking.close(picking, kept)
  Queue.remove(ctx, groups, members, blocks, order)
  return groups
end

-- Records of up to `limit` groups of subqueues whose age is below `below` (in thousandths of a version), stalest first,
-- their members, and the blocks of those.
function Queue.stalest(ctx, subqueues, below, limit)
  local members, stale = {}, {}
  for _, subqueue in ipairs(subqueues) do
    local age = call('ZRANGE', subqueue.a, 0, 0, 'WITHSCORES')[2]
    if age and tonumber(age) < below then
      stale[#stale + 1] = subqueue
    end
  end
  local open = Picking.open(Queue.subqueue_sources(ctx, stale, 'stalest_first'), 16)
  while #members < limit and open[1] and open[1].first < below do
    members[#members + 1] = Picking.next_member(open)
  end
  local blocks = Blocks.of(members)
  return Queue.load(ctx, blocks), members, blocks
end

-- Record of the group of subqueues with the smallest sequence, and its member; nil when there is none.
function Queue.oldest(ctx, subqueues)
  local first
  for _, subqueue in ipairs(subqueues) do
    if subqueue.oldest == nil then
      subqueue.oldest = call('ZRANGE', subqueue.q, 0, 0)[1] or false
    end
    if subqueue.oldest and (not first or subqueue.oldest < first) then
      first = subqueue.oldest
    end
  end
  if first then
    return Queue.load(ctx, Blocks.of({first}))[1], first
  end
  return nil
end

-- Queued groups of abandoned versions count as made with `version`, from which the present timeline starts. Brings up
-- to `limit` of their ages up to date and returns how many.
function Queue.clamp_ages(ctx, version, limit)
  local age, done = format('%d', 1000 * version), 0
  for _, subqueue in ipairs(Queue.load_subqueues(ctx)) do
    for _, member in ipairs(call('ZRANGEBYSCORE', subqueue.a, '(' .. age, '+inf', 'LIMIT', 0, limit - done)) do
      call('ZADD', subqueue.a, age, member)
      done = done + 1
    end
  end
  return done
end
