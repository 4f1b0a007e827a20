-- Settles groups of a step that is delivered or still forming, whose payloads are gone, as lost, and starts their tasks
-- anew. Steps and group ids come again, after a resume and in a run of the same name: whoever reads on with what an
-- earlier trainer was given must not touch the present one's. Payload keys never come again.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {term, step, payload keys}: term of the pull that found them gone
-- Replies {'ok', revision, lost} | {'error', 'unknown_run' | 'stale_term', ...}
-- Complexity O(groups of the step)

-- @include batches

local ctx = Run.context()
local request = unpack_msg(ARGV[1])
local term, step, reported = unpack(request, 1, 3)

Run.relieve()
if not Run.begin(ctx) then
  return refuse('unknown_run')
end
local state = ctx.state
local refusal = Run.check_term(ctx, term)
if refusal then
  return refusal
end
local is_delivered = step >= state.committed_steps and step < state.next_step
local is_open = step == state.next_step and state.micro_batches > 0
local header = not state.resuming and (is_delivered or is_open) and Batches.load_step(step)
local gone, lost = {}, 0
for _, payload in ipairs(reported) do
  gone[payload] = true
end

-- Takes the lost groups out of a micro-batch; returns it and whether there were any.
local function settle_lost(micro_batch)
  local stored, before = Batches.load_micro_batch(step, micro_batch), lost
  local kept, shards = {}, {}
  for rank = 0, #stored.ranks - 1 do
    local shard = {}
    for _, chunk in ipairs(Batches.rank_chunks(step, micro_batch, stored, rank)) do
      for _, group in ipairs(unpack_msg(chunk)) do
        if gone[group[G_PAYLOAD]] then
          lost = lost + 1
          Batches.count(header, -1, (Batches.sum({group}, header.train_version)))
          Groups.replace(ctx, group, Batches.step_state(ctx, step), 'lost', 'lost')
        else
          shard[#shard + 1] = group
          kept[#kept + 1] = group
        end
      end
    end
    shards[rank + 1] = shard
  end
  if lost > before then
    local _, own = Batches.sum(kept, header.train_version)
    stored.own = own
    Batches.store_micro_batch(ctx, step, micro_batch, stored, shards)
  end
  return stored
end

if header then
  local earlier
  for micro_batch = 0, header.micro_batches - 1 do
    local stored = settle_lost(micro_batch)
    if lost > 0 then
      stored.total = Batches.up_to(earlier, stored.own)
      Batches.save_micro_batch(step, micro_batch, stored)
    end
    earlier = stored.total
  end
  if lost > 0 then
    Batches.save_step(step, header)
  end
end
return reply('ok', Run.close(ctx), lost)
