-- Group records: a msgpack array, the same in a block (lib/blocks.lua) while the group is queued and in the chunks of a step
-- after. Head, tail and mean (of the versions of its tokens, in thousandths) are those of the present timeline as of
-- G_EPOCH, the run's epoch when the record was written; `clamp` brings them up to date.

-- @include timeline

local G_ID, G_TASK, G_SEQUENCE, G_PAYLOAD, G_HEAD, G_TAIL, G_EPOCH = 1, 2, 3, 4, 5, 6, 7
local G_SAMPLES, G_TOKENS, G_LOSS_TOKENS, G_BYTES, G_SPANS = 8, 9, 10, 11, 12
local G_ENVIRONMENT, G_PRIORITY, G_MEAN = 13, 14, 15

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
  if measure == 'mean' then
    return group[G_MEAN]
  end
  return 1000 * (measure == 'tail' and group[G_TAIL] or group[G_HEAD])
end
