-- Groups that are trained on more than once (policy max_uses): what a commit has trained may be drawn for later steps,
-- beside their own groups.
--
-- Hash `kept`: member (Blocks) → msgpack map of a group that was trained: refs (what needs its payloads and its task:
-- its own step and those that use it again until they are freed, and the pool), uses (steps that have it), origin (its
-- own step), pooled (it may be drawn), spent (a trainer or the store gave it up: it never may be again), orphan (its
-- task is not its any more), group (its record). Sorted set `reusable`, the pool (score: head version): what may be
-- drawn, the freshest last, of these the least used. ledger.uses: uses that were drawn, and what became of them; absent
-- before the first.
--
-- What a step uses again is its micro-batch Batches.REUSED, which closes with its first one.
--
-- ctx.keeps: whether anything is kept, once it was asked for.

-- @include blocks
-- @include record
-- @include remembered

local Reuse = {}

function Reuse.is_on(ctx)
  return (ctx.policy.max_uses or 1) > 1
end

function Reuse.load(ctx, group)
  if ctx.keeps == nil then
    ctx.keeps = call('EXISTS', key('kept')) == 1
  end
  local raw = ctx.keeps and call('HGET', key('kept'), Blocks.member_of(group[G_SEQUENCE]))
  return raw and unpack_msg(raw) or nil
end

-- Writes what is kept, or forgets it where nothing needs it any more. `ahead`: 1 where the run's revision is still to
-- rise, 0 after that.
function Reuse.settle(ctx, kept, ahead)
  local group = kept.group
  local member = Blocks.member_of(group[G_SEQUENCE])
  ctx.changed = true
  if kept.refs > 0 then
    ctx.keeps = true
    call('HSET', key('kept'), member, pack(kept))
    return
  end
  call('HDEL', key('kept'), member)
  call_many('SADD', key('trash'), Record.payloads(group))
  if not kept.orphan then
    Remembered.forget(ctx, {group[G_TASK]}, ahead)
  end
end

function Reuse.pool_member(kept)
  return format('%02d', 99 - kept.uses) .. Blocks.member_of(kept.group[G_SEQUENCE])
end

-- It may be drawn, unless it has had its uses, or its own step is not committed.
function Reuse.enter(ctx, kept)
  local is_trained = kept.origin < ctx.state.committed_steps
  if kept.pooled or kept.spent or not is_trained or kept.uses >= (ctx.policy.max_uses or 1) then
    return
  end
  kept.pooled, kept.refs = true, kept.refs + 1
  call('ZADD', key('reusable'), format('%d', Record.clamp(ctx, kept.group)[G_HEAD]), Reuse.pool_member(kept))
end

-- It may not be drawn any more.
function Reuse.leave(kept)
  if kept.pooled then
    call('ZREM', key('reusable'), Reuse.pool_member(kept))
    kept.pooled, kept.refs = false, kept.refs - 1
  end
end

-- Calls each(kept) with members of the pool, in order.
function Reuse.each_of(members, each)
  for _, member in ipairs(members) do
    each(unpack_msg(call('HGET', key('kept'), string.sub(member, 3))))
  end
end

-- Takes out of the pool what is older than `head`; returns how many, at most `limit`.
function Reuse.evict(ctx, head, limit)
  local members = call('ZRANGEBYSCORE', key('reusable'), '-inf', head, 'LIMIT', 0, limit)
  Reuse.each_of(members, function(kept)
    Reuse.leave(kept)
    Reuse.settle(ctx, kept, 1)
  end)
  return #members
end

-- Takes out of the pool what is too old for a step, or all where nothing is used again; returns how many, at most
-- `limit`.
function Reuse.evict_stale(ctx, train_version, limit)
  local below = format('(%d', train_version - (ctx.policy.reuse_max_staleness or 0))
  return Reuse.evict(ctx, Reuse.is_on(ctx) and below or '+inf', limit)
end

-- Moves uses from one state to another; from 'drawn' new ones.
function Reuse.move(ctx, from, to, count)
  local ledger = ctx.ledger
  if count == 0 then
    return
  end
  ledger.uses = ledger.uses or {drawn = 0, delivered = 0, trained = 0, given_back = 0, lost = 0}
  ledger.uses[from] = ledger.uses[from] + (from == 'drawn' and count or -count)
  ledger.uses[to] = ledger.uses[to] + count
  ctx.changed = true
end

-- Records of what a step of `target` groups uses again; how often each was used before is in them.
function Reuse.draw(ctx, target, equal, world_size)
  local most = floor(target * (ctx.policy.reuse_share_milli or 0) / 1000)
  local drawn, groups = {}, {}
  while Reuse.is_on(ctx) and #drawn < most do
    local members = call('ZREVRANGE', key('reusable'), 0, most - #drawn - 1)
    if #members == 0 then
      break
    end
    Reuse.each_of(members, function(kept)
      Reuse.leave(kept)
      if kept.uses < ctx.policy.max_uses then
        drawn[#drawn + 1] = kept
      else
        Reuse.settle(ctx, kept, 1)
      end
    end)
  end
  local taken = equal and #drawn - #drawn % world_size or #drawn
  for index, kept in ipairs(drawn) do
    if index <= taken then
      kept.uses, kept.refs = kept.uses + 1, kept.refs + 1
    end
    Reuse.enter(ctx, kept)
    Reuse.settle(ctx, kept, 1)
    if index <= taken then
      local group = Record.clamp(ctx, kept.group)
      group[G_STAGE], group[G_TRIES], group[G_ADDED] = false, 0, group[G_ADDED] or {}
      group[G_USES] = kept.uses - 1
      groups[index] = group
    end
  end
  return groups
end

-- Groups of a step were trained.
function Reuse.keep(ctx, step, groups)
  for _, group in ipairs(groups) do
    local kept = Reuse.load(ctx, group)
      or {refs = 1, uses = 1, origin = step, pooled = false, spent = false, orphan = false, group = group}
    Reuse.enter(ctx, kept)
    if kept.pooled then
      Reuse.settle(ctx, kept, 1)
    end
  end
end

-- The step of groups is not trained any more.
function Reuse.suspend(ctx, groups)
  for _, group in ipairs(groups) do
    local kept = Reuse.load(ctx, group)
    if kept then
      Reuse.leave(kept)
      Reuse.settle(ctx, kept, 1)
    end
  end
end

-- A group leaves its own step with nothing, and no step uses it: nothing is to be known of it here.
function Reuse.disown(ctx, group)
  local kept = Reuse.load(ctx, group)
  if kept then
    Reuse.leave(kept)
    call('HDEL', key('kept'), Blocks.member_of(group[G_SEQUENCE]))
  end
end

-- A resume takes a use back: it may be drawn again.
function Reuse.take_back(ctx, group)
  local kept = Reuse.load(ctx, group)
  Reuse.leave(kept)
  kept.uses, kept.refs = kept.uses - 1, kept.refs - 1
  Reuse.enter(ctx, kept)
  Reuse.settle(ctx, kept, 1)
end

-- A group ends in a step, in its own one where `orphan`: it is not drawn again. False where nothing is kept of it.
function Reuse.give_up(ctx, group, orphan)
  local kept = Reuse.load(ctx, group)
  if not kept then
    return false
  end
  Reuse.leave(kept)
  kept.spent, kept.orphan, kept.refs = true, kept.orphan or orphan, kept.refs - 1
  Reuse.settle(ctx, kept, 1)
  return true
end

-- A step that has a group is freed. False where nothing is kept of it.
function Reuse.release(ctx, group)
  local kept = Reuse.load(ctx, group)
  if not kept then
    return false
  end
  kept.refs = kept.refs - 1
  Reuse.settle(ctx, kept, 0)
  return true
end

-- What may be drawn counts as made with `version` at the latest. Brings up to `limit` up to date and returns how many.
function Reuse.clamp_heads(version, limit)
  local at = format('%d', version)
  local members = call('ZRANGEBYSCORE', key('reusable'), '(' .. at, '+inf', 'LIMIT', 0, limit)
  for _, member in ipairs(members) do
    call('ZADD', key('reusable'), at, member)
  end
  return #members
end
