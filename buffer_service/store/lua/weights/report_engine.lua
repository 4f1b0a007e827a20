-- Records what a worker says of an engine. Adds what its counters grew by to the run's totals, and gives or takes back
-- its permit to be out of service for a load.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, engine_id, report, state, wants_load (0 or 1), decoded_tokens, decode_busy_ms,
--         decode_request_ms, reload counters (empty: none are said), weights_from, samples (packed ENGINE_SAMPLES of
--         rules/totals.py; empty: none)}; report: packed {engine_id, worker_id, state, term, version, reloads,
--         last_reload_ms, last_error, errors, membership, prepared_term (0: none), prepared_version, weights_url}
-- Replies {'ok', revision, term, version, may_load (0 or 1)} | {'error', 'unknown_run' | 'store_rolled_back', ...}
-- Complexity O(log engines), and up to the number of permits or the engines that have left the line in silence

-- @include permits
-- @include fresh_start
-- @include totals
-- @include totals_of

local ctx = Run.context()
local request = unpack_msg(ARGV[1])
local seen, engine_id, report, engine_state, wants_load = unpack(request, 1, 5)
Run.relieve()
local refusal = Run.open(ctx, seen)
if refusal then
  return refusal
end
local state = ctx.state
local last_report = call('HGET', key('engines'), engine_id)
if last_report ~= report then
  FreshStart.learn(ctx, engine_id, last_report and unpack_msg(last_report), unpack_msg(report))
  call('HSET', key('engines'), engine_id, report)
  ctx.changed = true
  ctx.topics.tasks = true
end
Permits.hear_engine(ctx, engine_id)

local counters = {unpack(request, 6, 8)}
local said, packed = call('HGET', key('engine_counters'), engine_id), pack(counters)
if said ~= packed then
  call('HSET', key('engine_counters'), engine_id, packed)
  -- What an engine did before the run heard of it, in a deleted run of this name perhaps, is none of this run's.
  local before = said and unpack_msg(said) or counters
  Totals.grow(ctx, TOTALS_OF.engines, before, counters)
end

-- Beside the record, which replicas of an older version read too. Absent: nothing was said.
for name, said_now in pairs({weights_from = request[10], engine_samples = request[11]}) do
  local value = said_now ~= '' and said_now
  if call('HGET', key(name), engine_id) ~= value then
    if value then
      call('HSET', key(name), engine_id, value)
    else
      call('HDEL', key(name), engine_id)
    end
  end
end

if #request[9] > 0 then
  Totals.count_reloads(engine_id, request[9])
end

-- An engine that does not serve anyway cannot be taken out of service: it needs no permit.
local needs_permit = Permits.limit(ctx) > 0 and (engine_state == 'ready' or engine_state == 'loading')
local may_load = not needs_permit
if needs_permit and wants_load == 1 then
  may_load = Permits.take(ctx, engine_id)
else
  Permits.leave(ctx, engine_id)
end
return reply('ok', Run.close(ctx), state.term, state.version, may_load and 1 or 0)
