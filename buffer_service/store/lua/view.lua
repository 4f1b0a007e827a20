-- The whole state of a run. What is queued, delivered, pending and leased is counted from what exists, so that a ledger
-- that went wrong shows.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {}
-- Replies {'view', policy, state, ledger, queued, delivered, pending, leased, engines, failures} | {'error',
--         'unknown_run'};
--         queued and delivered are {groups, samples, tokens, bytes}, engines and failures packed records
-- Complexity O(queued + steps that are not committed); above 20,000 queued groups their sizes come from the ledger

-- @include batches

if not load_run() then
  return refuse('unknown_run')
end

local queued = {call('ZCARD', QUEUE), 0, 0, 0}
if queued[1] > 20000 then
  local sums = ledger.groups.queued
  queued = {queued[1], sums[2], sums[3], sums[4]}
else
  for first = 0, queued[1] - 1, 1000 do
    local ids = call('ZRANGE', QUEUE, first, first + 999)
    for _, raw in ipairs(call('HMGET', GROUPS, unpack(ids))) do
      local group = unpack_msg(raw)
      add_amount(queued, 1, 0, group[G_SAMPLES], group[G_TOKENS], group[G_BYTES])
    end
  end
end

local delivered = {0, 0, 0, 0}
for step = state.committed_steps, state.next_step - 1 do
  local header = load_step(step)
  add_amount(delivered, 1, header.groups, header.samples, header.tokens, header.bytes)
end

local pending = call('ZCARD', PENDING) + call('ZCARD', DELAYED)
return reply('view', policy, state, ledger, queued, delivered, pending, call('ZCARD', LEASES),
  call('HVALS', key('engines')), call('LRANGE', key('failures'), 0, -1))
