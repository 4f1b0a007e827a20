-- A micro-batch of more groups than one script takes on is gathered in portions, and closed with the last one
-- (Micro-batches). Gathered groups are queued by every rule and count, and only cannot be found in the queue. Where
-- the micro-batch is not to be any more, they go back there, the last portion first, and no environment has had a turn.
--
-- state.gathered, while there are any: {portions, groups, samples, tokens, bytes}.
-- hash `gathered`: terms (msgpack, {train_version, batch_groups, world_size} of the pull that began; '' when all has to
-- go back), stride (of the queue before it, '' for none), and for each portion, counted from 1, a msgpack array {ids,
-- sequences, tokens, packed records, sums}: the first four of each group, in order of pick; sums as Batches.sum returns
-- them, in an array.

-- @include groups

local Gathering = {}

-- The terms of what is gathered, three values; none when all has to go back.
function Gathering.terms()
  local raw = call('HGET', key('gathered'), 'terms')
  if raw ~= '' then
    return unpack(unpack_msg(raw))
  end
end

-- What is gathered was picked by rules that no longer hold: all of it has to go back.
function Gathering.void(ctx)
  if ctx.state.gathered then
    call('HSET', key('gathered'), 'terms', '')
    if not Picking.shares_on(ctx) then
      call('HSET', key('gathered'), 'stride', '')
    end
  end
end

-- Counts a portion with these sums in (sign 1) or out of (-1) what is gathered.
function Gathering.count(ctx, sign, own)
  local state = ctx.state
  local gathered = state.gathered or {0, 0, 0, 0, 0}
  gathered[GATHERED_PORTIONS] = gathered[GATHERED_PORTIONS] + sign
  for place, name in ipairs({'groups', 'samples', 'tokens', 'bytes'}) do
    gathered[place + 1] = gathered[place + 1] + sign * own[name]
  end
  state.gathered = gathered
  ctx.changed = true
end

-- Keeps groups that were just taken out of the queue; `terms` and `stride` count with the first of them, `stride` as it
-- was before.
function Gathering.keep(ctx, terms, stride, groups, sums)
  local state = ctx.state
  local ids, sequences, tokens, records = {}, {}, {}, {}
  for index, group in ipairs(groups) do
    ids[index], sequences[index], tokens[index] = group[G_ID], group[G_SEQUENCE], group[G_TOKENS]
    records[index] = Record.pack(ctx, group)
  end
  if not state.gathered then
    call('HSET', key('gathered'), 'terms', pack(terms), 'stride', stride)
  end
  Gathering.count(ctx, 1, sums[2])
  local field = format('%d', state.gathered[GATHERED_PORTIONS])
  call('HSET', key('gathered'), field, pack({ids, sequences, tokens, records, sums}))
end

-- What is gathered, in order of pick: records with the fields that a micro-batch is split and stored by, and the
-- portions' sums. The micro-batch's now.
function Gathering.take(ctx)
  local state, topics = ctx.state, ctx.topics
  local groups, sums = {}, {}
  if not state.gathered then
    return groups, sums
  end
  for portion = 1, state.gathered[GATHERED_PORTIONS] do
    local raw = call('HGET', key('gathered'), format('%d', portion))
    local ids, sequences, tokens, records, its = unpack(unpack_msg(raw))
    for index, record in ipairs(records) do
      groups[#groups + 1] = Record.of_stored(ctx, record, ids[index], sequences[index], tokens[index])
    end
    sums[portion] = its
  end
  call('UNLINK', key('gathered'))
  state.gathered = nil
  topics.space, topics.tasks = true, true
  return groups, sums
end

-- Puts the last portion back into the queue; the others have to follow, for the turns are those of all of them.
function Gathering.give_back(ctx)
  local state = ctx.state
  Gathering.void(ctx)
  local field = format('%d', state.gathered[GATHERED_PORTIONS])
  local _, _, _, records, sums = unpack(unpack_msg(call('HGET', key('gathered'), field)))
  for _, raw in ipairs(records) do
    Queue.add(ctx, Record.unpack(ctx, raw))
  end
  call('HDEL', key('gathered'), field)
  Gathering.count(ctx, -1, sums[2])
  if state.gathered[GATHERED_PORTIONS] == 0 then
    local stride = call('HGET', key('gathered'), 'stride')
    if stride ~= '' then
      call('HSET', RUN, 'queue_stride', stride)
    else
      call('HDEL', RUN, 'queue_stride')
    end
    call('UNLINK', key('gathered'))
    state.gathered = nil
  end
end
