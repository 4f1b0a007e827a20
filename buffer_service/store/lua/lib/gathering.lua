-- A round of more groups than one script takes on is gathered in portions, and closed with the last one
-- (lib/rounds.lua). Gathered groups are queued by every rule and count, and only cannot be found in the queue. Where
-- the round is not to be any more, they go back there, the last portion first, and no environment has had a turn.
--
-- state.gathered, while there are any: {portions, groups, samples, tokens, bytes}.
-- hash `gathered`: terms (msgpack, {train_version, batch_groups, world_size} of the pull that began; '' when all has to
-- go back), stride (of the queue before it, '' for none), and for each portion, counted from 1, a msgpack array {ids,
-- sequences, tokens, packed records, sums}: the first four of each group, in order of pick; sums as sum_groups returns
-- them, in an array.

-- @include groups

local GATHERED = key('gathered')

-- The terms of what is gathered, three values; none when all has to go back.
local function gathered_terms()
  local raw = call('HGET', GATHERED, 'terms')
  if raw ~= '' then
    return unpack(unpack_msg(raw))
  end
end

-- What is gathered was picked by rules that no longer hold: all of it has to go back.
local function void_gathered()
  if state.gathered then
    call('HSET', GATHERED, 'terms', '')
    if not shares_on() then
      call('HSET', GATHERED, 'stride', '')
    end
  end
end

-- Counts a portion with these sums in (sign 1) or out of (-1) what is gathered.
local function count_gathered(sign, own)
  local gathered = state.gathered or {0, 0, 0, 0, 0}
  gathered[1] = gathered[1] + sign
  for place, name in ipairs({'groups', 'samples', 'tokens', 'bytes'}) do
    gathered[place + 1] = gathered[place + 1] + sign * own[name]
  end
  state.gathered = gathered
  changed = true
end

-- Keeps groups that were just taken out of the queue; `terms` and `stride` count with the first of them, `stride` as it
-- was before.
local function keep_gathered(terms, stride, groups, sums)
  local ids, sequences, tokens, records = {}, {}, {}, {}
  for index, group in ipairs(groups) do
    ids[index], sequences[index], tokens[index] = group[G_ID], group[G_SEQUENCE], group[G_TOKENS]
    records[index] = pack_record(group)
  end
  if not state.gathered then
    call('HSET', GATHERED, 'terms', pack(terms), 'stride', stride)
  end
  count_gathered(1, sums[2])
  call('HSET', GATHERED, format('%d', state.gathered[1]), pack({ids, sequences, tokens, records, sums}))
end

-- What is gathered, in order of pick: records with the fields that a round is split and stored by, and the portions'
-- sums. The round's now.
local function take_gathered()
  local groups, sums = {}, {}
  if not state.gathered then
    return groups, sums
  end
  for portion = 1, state.gathered[1] do
    local ids, sequences, tokens, records, its = unpack(unpack_msg(call('HGET', GATHERED, format('%d', portion))))
    for index, raw in ipairs(records) do
      groups[#groups + 1] = stored_record(raw, ids[index], sequences[index], tokens[index])
    end
    sums[portion] = its
  end
  call('UNLINK', GATHERED)
  state.gathered = nil
  topics.space, topics.tasks = true, true
  return groups, sums
end

-- Puts the last portion back into the queue; the others have to follow, for the turns are those of all of them.
local function give_back_gathered()
  void_gathered()
  local field = format('%d', state.gathered[1])
  local _, _, _, records, sums = unpack(unpack_msg(call('HGET', GATHERED, field)))
  for _, raw in ipairs(records) do
    index_group(unpack_record(raw))
  end
  call('HDEL', GATHERED, field)
  count_gathered(-1, sums[2])
  if state.gathered[1] == 0 then
    local stride = call('HGET', GATHERED, 'stride')
    if stride ~= '' then
      call('HSET', RUN, 'queue_stride', stride)
    else
      call('HDEL', RUN, 'queue_stride')
    end
    call('UNLINK', GATHERED)
    state.gathered = nil
  end
end
