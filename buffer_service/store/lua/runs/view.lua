-- The whole state of a run. What is queued, forming, delivered, pending and leased is counted from what exists, so that
-- a ledger that went wrong shows.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {}
-- Replies {'view', policy, state, ledger, queued, forming, delivered, pending, leased, environments, engines,
--         heard, now, failures, totals, response_lengths, counters, snapshots, first, last, staleness,
--         reloads, waited, relaying, weights_from, engine_samples, decision, stages, work, reusable, blob_bytes}
--       | {'error', 'unknown_run'};
--         queued, forming and delivered are {groups, samples, tokens, bytes}, environments {name, packed ledger, ...},
--         engines and failures packed records, heard {engine, ms of its last report, ...},
--         totals an array (Totals), response_lengths {bucket, samples, ...}, counters {engine, packed, ...};
--         snapshots: how many are kept, of which first and last are packed ('' for none);
--         staleness and reloads: packed counts (Totals), '' for none; waited: packed
--         (MicroBatches.awaited), '' for none; relaying {client, packed {ms, why}, ...};
--         weights_from {engine, text, ...}; engine_samples {engine, packed ENGINE_SAMPLES, ...};
--         decision: packed (commands/steering.py), '' for none; stages as Stages.states;
--         reusable: groups that may be used again; blob_bytes: of all blobs;
--         work {environment, {starts, failed_attempts, failed_tasks, failed_samples, ms until its next start}, ...}
-- Complexity O(queued + steps that are not committed + environments); above 2,000 queued groups their sizes come from
-- the ledger

-- @include batches
-- @include stages
-- @include totals

local ctx = Run.context()
if not Run.load(ctx) then
  return refuse('unknown_run')
end
local state, ledger = ctx.state, ctx.ledger

local queued = {Queue.total(ctx), 0, 0, 0}
if queued[1] > 2000 then
  local sums = ledger.groups.queued
  queued = {queued[1], sums[2], sums[3], sums[4]}
else
  queued = state.gathered and {unpack(state.gathered, 2, 5)} or {0, 0, 0, 0}
  for _, subqueue in ipairs(Queue.load_subqueues(ctx)) do
    for _, block in ipairs(Blocks.of(call('ZRANGE', subqueue.q, 0, -1))) do
      for _, raw in ipairs(call('HMGET', block.key, unpack(block.members))) do
        local group = raw and unpack_msg(raw)
        if group then
          Ledger.add_amount(queued, 1, 1, group[G_SAMPLES], group[G_TOKENS], group[G_BYTES])
        end
      end
    end
  end
end

local function sum_steps(first, last)
  local sums = {0, 0, 0, 0}
  for step = first, last do
    local header = Batches.load_step(step)
    Ledger.add_amount(sums, 1, header.groups, header.samples, header.tokens, header.bytes)
  end
  return sums
end

local delivered = sum_steps(state.committed_steps, state.next_step - 1)
local forming = state.micro_batches > 0 and sum_steps(state.next_step, state.next_step) or {0, 0, 0, 0}
-- By environment its counts, and how long its limit keeps it from the next start.
local work = call('HGETALL', key('env_work'))
for index = 1, #work, 2 do
  local counts = Ledger.work_of(ctx, work[index])
  work[index + 1] = {counts[1], counts[2], counts[3], counts[4], Pending.wait_ms(ctx, work[index])}
end
return reply('view', ctx.stated, state, ledger, queued, forming, delivered, Pending.count(ctx),
  call('ZCARD', key('leases')), call('HGETALL', key('env_ledger')), call('HVALS', key('engines')),
  call('ZRANGE', key('engines_heard'), 0, -1, 'WITHSCORES'), ctx.now, call('LRANGE', key('failures'), 0, -1),
  Totals.load(ctx), call('HGETALL', key('response_lengths')), call('HGETALL', key('engine_counters')),
  call('LLEN', key('snapshots')), call('LINDEX', key('snapshots'), 0) or '', call('LINDEX', key('snapshots'), -1) or '',
  call('HGET', RUN, 'staleness') or '', call('HGET', RUN, 'reloads') or '', call('HGET', RUN, 'stale_wait') or '',
  call('HGETALL', key('relaying')), call('HGETALL', key('weights_from')),
  call('HGETALL', key('engine_samples')), call('HGET', RUN, 'decision') or '', Stages.states(ctx),
  work, call('ZCARD', key('reusable')), tonumber(call('HGET', key('blobs'), '') or 0))
