-- Settles groups of a step that is delivered or still forming, whose payloads are gone, as lost, and starts their tasks
-- anew. Steps and group ids come again, after a resume and in a run of the same name: whoever reads on with what an
-- earlier trainer was given must not touch the present one's. Payload keys never come again.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {epoch, step, payload keys}: epoch of the pull that found them gone
-- Replies {'ok', revision, lost} | {'error', 'unknown_run' | 'stale_epoch', ...}
-- Complexity O(groups of the step)

-- @include batches

local request = unpack_msg(ARGV[1])
local epoch, step, reported = unpack(request, 1, 3)

relieve()
if not begin_run() then
  return refuse('unknown_run')
end
local refusal = check_epoch(epoch)
if refusal then
  return refusal
end
local is_delivered = step >= state.committed_steps and step < state.next_step
local is_open = step == state.next_step and state.rounds > 0
local header = not state.resuming and (is_delivered or is_open) and load_step(step)
local gone, lost = {}, 0
for _, payload in ipairs(reported) do
  gone[payload] = true
end

-- Takes the lost groups out of a round; returns it and whether there were any.
local function settle_lost(round)
  local stored, before = load_round(step, round), lost
  local kept, shards = {}, {}
  for rank = 0, #stored.ranks - 1 do
    local shard = {}
    for _, chunk in ipairs(rank_chunks(step, round, stored, rank)) do
      for _, group in ipairs(unpack_msg(chunk)) do
        if gone[group[G_PAYLOAD]] then
          lost = lost + 1
          count_in_step(header, -1, (sum_groups({group}, header.train_version)))
          replace_group(group, step_state(step), 'lost', 'lost')
        else
          shard[#shard + 1] = group
          kept[#kept + 1] = group
        end
      end
    end
    shards[rank + 1] = shard
  end
  if lost > before then
    local _, own = sum_groups(kept, header.train_version)
    stored.own = own
    store_round(step, round, stored, shards)
  end
  return stored
end

if header then
  local earlier
  for round = 0, header.rounds - 1 do
    local stored = settle_lost(round)
    if lost > 0 then
      stored.total = up_to(earlier, stored.own)
      save_round(step, round, stored)
    end
    earlier = stored.total
  end
  if lost > 0 then
    save_step(step, header)
  end
end
return reply('ok', close_run(), lost)
