-- Group records: a msgpack array, the same in a block (lib/blocks.lua) while the group is queued and in the chunks of a
-- step after. Head, tail and mean (of the versions of its tokens, in thousandths) are those of the present timeline as
-- of G_EPOCH, the run's epoch when the record was written; `clamp` brings them up to date.

-- @include timeline

local G_ID, G_TASK, G_SEQUENCE, G_PAYLOAD, G_HEAD, G_TAIL, G_EPOCH = 1, 2, 3, 4, 5, 6, 7
local G_SAMPLES, G_TOKENS, G_LOSS_TOKENS, G_BYTES, G_SPANS = 8, 9, 10, 11, 12
local G_ENVIRONMENT, G_PRIORITY, G_MEAN, G_RESPONSES = 13, 14, 15, 16

-- G_RESPONSES is a struct that assembly alone unpacks: response tokens, those of the longest response, sum of rewards
-- in thousandths, turns of role assistant, truncated samples.
local RESPONSES = '<I5I4i6I4I2'

-- After it: (version, response tokens of it) for each version below the tail, of the timeline as of the group's
-- acceptance, so that min(version, tail) is that of the present one. None where all tokens count as of the mean
-- version.
local VERSION_TOKENS = '<I6I5'

-- Packed records as they were read, by record. A record is changed by `clamp` alone, which these did not need.
local raw_records = {}

-- Brings a record into the present timeline.
local function clamp(group)
  local epoch = group[G_EPOCH]
  if epoch ~= state.epoch then
    group[G_HEAD], group[G_TAIL] = effective(epoch, group[G_HEAD]), effective(epoch, group[G_TAIL])
    group[G_MEAN] = effective_milli(epoch, group[G_MEAN])
    group[G_EPOCH] = state.epoch
  end
  return group
end

-- The version, in thousandths, that the gate and `stalest_first` go by. The record must be of the present timeline.
local function age_of(group)
  local measure = policy.staleness_measure
  if measure == 'head' then
    return 1000 * group[G_HEAD]
  elseif measure == 'mean' then
    return group[G_MEAN]
  elseif measure == 'tail' then
    return 1000 * group[G_TAIL]
  end
  return error('unknown staleness_measure ' .. measure)
end

-- A queued group's record, of the present timeline.
local function unpack_record(raw)
  -- The values behind the array's header, of three bytes. This table is made once; cmsgpack's grows with each value.
  local group = {select(2, cmsgpack.unpack_limit(raw, G_RESPONSES, 3))}
  if group[G_EPOCH] == state.epoch then
    raw_records[group] = raw
    return group
  end
  return clamp(group)
end

-- A record as it is stored. One that is as it was read is not packed again.
local function pack_record(group)
  return raw_records[group] or pack(group)
end

-- Of a record that is packed: what a round is split and stored by.
local function stored_record(raw, id, sequence, tokens)
  local group = {[G_ID] = id, [G_SEQUENCE] = sequence, [G_TOKENS] = tokens}
  raw_records[group] = raw
  return group
end

-- Records first to last as one msgpack array.
local function pack_records(groups, first, last)
  local count = last - first + 1
  local parts = {count < 16 and string.char(144 + count) or string.char(220, floor(count / 256), count % 256)}
  for index = 1, count do
    parts[index + 1] = pack_record(groups[first + index - 1])
  end
  return table.concat(parts)
end

-- Puts records in order of sequence. Numbers alone are sorted without a call of Lua for every comparison.
local function sort_groups(groups)
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
