-- What a push accepts: the totals that it adds to, and what assembly needs of each group.
--
-- ctx.accepted, once a group was accepted: sums in the order of TOTALS_OF.accepted; response_tokens: by environment;
-- by_length: samples by bucket of lengths.

-- @include ledger
-- @include record
-- @include totals
-- @include totals_of

local Accepted = {}

-- Adds a group that is being accepted; a lease counts when it is the task's last one, whose beginning is known.
function Accepted.add(ctx, group, task, attempt)
  local accepted = ctx.accepted
  if not accepted then
    accepted = {0, 0, 0, 0, 0, 0, 0, 0, 0}
    ctx.accepted, ctx.response_tokens, ctx.by_length = accepted, {}, {}
  end
  local response_tokens, by_length = ctx.response_tokens, ctx.by_length
  local environment, tokens, buckets = group[P_ENVIRONMENT], group[P_RESPONSE_TOKENS], group[P_LENGTH_BUCKETS]
  accepted[1], accepted[2], accepted[3] = accepted[1] + 1, accepted[2] + group[P_SAMPLES], accepted[3] + tokens
  accepted[4], accepted[5] = accepted[4] + group[P_MAX_RESPONSE_TOKENS], accepted[5] + group[P_REWARD_MILLI]
  accepted[6], accepted[7] = accepted[6] + group[P_TURNS], accepted[7] + group[P_TRUNCATED_SAMPLES]
  if attempt > 0 and attempt == task.attempt then
    accepted[8], accepted[9] = accepted[8] + 1, accepted[9] + ctx.now - task.granted
  end
  response_tokens[environment] = (response_tokens[environment] or 0) + tokens
  if group[P_FAILED_SAMPLES] > 0 then
    Ledger.count_work(ctx, environment, 4, group[P_FAILED_SAMPLES])
  end
  for index = 1, #buckets, 2 do
    by_length[buckets[index]] = (by_length[buckets[index]] or 0) + buckets[index + 1]
  end
end

-- A moving mean over the last groups, about 64 of them: which part of them passes the filter.
function Accepted.follow(ctx, passed)
  local statistics = ctx.ledger.statistics
  statistics.recent_acceptance_ppm = floor((statistics.recent_acceptance_ppm * 63 + (passed and 1000000 or 0)) / 64)
end

-- Adds what this call has accepted to the totals. Called once.
function Accepted.count(ctx)
  if not ctx.accepted then
    return
  end
  for place, name in ipairs(TOTALS_OF.accepted) do
    Totals.count(ctx, name, ctx.accepted[place])
  end
  for environment, tokens in pairs(ctx.response_tokens) do
    Totals.add(Ledger.environment_totals(ctx, environment), 1, tokens)
  end
  for bucket, samples in pairs(ctx.by_length) do
    call('HINCRBY', key('response_lengths'), format('%d', bucket), format('%d', samples))
  end
end

-- What assembly needs of a pushed group: see Record.
function Accepted.pack_responses(ctx, group)
  local packed = struct.pack(Record.RESPONSES, group[P_RESPONSE_TOKENS], group[P_MAX_RESPONSE_TOKENS],
    group[P_REWARD_MILLI], group[P_TURNS], group[P_TRUNCATED_SAMPLES])
  local versions, trajectories = group[P_VERSION_TOKENS], group[P_TRAJECTORIES]
  if trajectories > 0 and trajectories < group[P_SAMPLES] then
    packed = packed .. struct.pack(Record.VERSION_TOKENS, Record.NO_VERSION, group[P_SAMPLES] - trajectories)
  end
  for index = 1, #versions, 3 do
    local version = Timeline.effective(ctx, versions[index], versions[index + 1])
    packed = packed .. struct.pack(Record.VERSION_TOKENS, version, versions[index + 2])
  end
  return packed
end
