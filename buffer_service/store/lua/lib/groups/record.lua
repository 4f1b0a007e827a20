-- Group records: a msgpack array, the same in a block (Blocks) while the group is queued and in the chunks of a
-- step after. Head, tail and mean (of the versions of its tokens, in thousandths) are those of the present timeline as
-- of G_TERM, the run's term when the record was written; Record.clamp brings them up to date.
--
-- Groups of a run with stages have three fields more: G_STAGE is the stage in which a group waits, with a * where a
-- worker holds it, or false; G_TRIES how often that failed; G_ADDED what stages have added, in order, {name, payload
-- key} each.
--
-- ctx.raw_records: packed records as they were read, by record. Record.clamp alone changes a record, and these did
-- not need it.

-- @include timeline

local Record = {}

-- G_RESPONSES is a struct that assembly alone unpacks: response tokens, those of the longest response, sum of rewards
-- in thousandths, turns of role assistant, truncated samples.
Record.RESPONSES = '<I5I4i6I4I2'

-- After it: (version, response tokens of it) for each version below the tail, of the timeline as of the group's
-- acceptance, so that min(version, tail) is that of the present one. None where all tokens count as of the mean
-- version. Before these, where samples are rows of trajectories, one for no version: samples beyond the trajectories.
Record.VERSION_TOKENS = '<I6I5'
Record.NO_VERSION = 2 ^ 48 - 1

-- Keys of all payloads of a group: its own first, then those that stages have added.
function Record.payloads(group)
  local payloads = {group[G_PAYLOAD]}
  for index, added in ipairs(group[G_ADDED] or {}) do
    payloads[index + 1] = added[2]
  end
  return payloads
end

-- Brings a record into the present timeline.
function Record.clamp(ctx, group)
  local state = ctx.state
  local term = group[G_TERM]
  if term ~= state.term then
    group[G_HEAD] = Timeline.effective(ctx, term, group[G_HEAD])
    group[G_TAIL] = Timeline.effective(ctx, term, group[G_TAIL])
    group[G_MEAN] = Timeline.effective_milli(ctx, term, group[G_MEAN])
    group[G_TERM] = state.term
  end
  return group
end

-- The version, in thousandths, that the gate and `stalest_first` go by. The record must be of the present timeline.
function Record.age_of(ctx, group)
  local measure = ctx.policy.staleness_measure
  if measure == 'head' then
    return 1000 * group[G_HEAD]
  elseif measure == 'mean' then
    return group[G_MEAN]
  elseif measure == 'tail' then
    return 1000 * group[G_TAIL]
  end
  return error('unknown staleness_measure ' .. measure)
end

function Record.keep_raw(ctx, group, raw)
  if not ctx.raw_records then
    ctx.raw_records = {}
  end
  ctx.raw_records[group] = raw
end

-- A queued group's record, of the present timeline.
function Record.unpack(ctx, raw)
  -- The values behind the array's header, of three bytes. This table is made once; cmsgpack's grows with each value.
  local group = {select(2, cmsgpack.unpack_limit(raw, G_ADDED, 3))}
  if group[G_TERM] == ctx.state.term then
    Record.keep_raw(ctx, group, raw)
    return group
  end
  return Record.clamp(ctx, group)
end

-- A record as it is stored. One that is as it was read is not packed again.
function Record.pack(ctx, group)
  return ctx.raw_records and ctx.raw_records[group] or pack(group)
end

-- Of a record that is packed: what a micro-batch is split and stored by.
function Record.of_stored(ctx, raw, id, sequence, tokens)
  local group = {[G_ID] = id, [G_SEQUENCE] = sequence, [G_TOKENS] = tokens}
  Record.keep_raw(ctx, group, raw)
  return group
end

-- Records first to last as one msgpack array.
function Record.pack_many(ctx, groups, first, last)
  local count = last - first + 1
  local parts = {count < 16 and string.char(144 + count) or string.char(220, floor(count / 256), count % 256)}
  for index = 1, count do
    parts[index + 1] = Record.pack(ctx, groups[first + index - 1])
  end
  return table.concat(parts)
end

-- How many records such an array has.
function Record.count_of(packed)
  local first = string.byte(packed)
  return first < 220 and first - 144 or 256 * string.byte(packed, 2) + string.byte(packed, 3)
end

-- Puts records in order of sequence. Numbers alone are sorted without a call of Lua for every comparison.
function Record.sort(groups)
  local sequences, by_sequence, in_order = {}, {}, true
  for index = 1, #groups do
    sequences[index] = groups[index][G_SEQUENCE]
    in_order = in_order and (index == 1 or sequences[index - 1] < sequences[index])
  end
  if in_order then
    return
  end
  for index = 1, #groups do
    by_sequence[sequences[index]] = groups[index]
  end
  table.sort(sequences)
  for index = 1, #groups do
    groups[index] = by_sequence[sequences[index]]
  end
end
