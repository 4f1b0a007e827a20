-- Settles groups of a delivered step whose payloads are gone as lost, and starts their tasks anew.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {step, group_ids}
-- Replies {'ok', revision, lost} | {'error', 'unknown_run'}
-- Complexity O(groups of the step)

-- @include batches

local request = unpack_msg(ARGV[1])
local step = request[1]

relieve()
if not begin_run() then
  return refuse('unknown_run')
end
local header = step >= state.committed_steps and step < state.next_step and load_step(step)
local lost_ids, lost = {}, 0
for _, group_id in ipairs(request[2]) do
  lost_ids[group_id] = true
end
if header then
  local kept, shards = {}, {}
  for rank = 0, header.world_size - 1 do
    local shard = {}
    for _, chunk in ipairs(rank_chunks(step, header, rank)) do
      for _, group in ipairs(unpack_msg(chunk)) do
        if lost_ids[group[G_ID]] then
          lost = lost + 1
          replace_group(group, 'delivered', 'lost', 'lost')
        else
          shard[#shard + 1] = group
          kept[#kept + 1] = group
        end
      end
    end
    shards[rank + 1] = shard
  end
  if lost > 0 then
    delete_chunks(step, header)
    measure(header, kept)
    store_shards(step, header, shards)
    state.assembled_now = state.assembled_now - lost
  end
end
return reply('ok', close_run(), lost)
