-- Housekeeping of a run. Ends leases that are past their expiry, frees what was released, gives up payloads that were
-- staged and never indexed, forgets engines and idle workers that are silent. Any number of replicas may sweep at once.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {age_ms}: how long a payload may be staged
-- Replies {'swept', done, more} | {'error', 'unknown_run'}
-- Complexity O(1000)

-- @include burial
-- @include commit
-- @include silence
-- @include stages
-- @include staging

local ctx = Run.context()
local age_ms = unpack(unpack_msg(ARGV[1]))
Run.relieve()
if not Run.begin(ctx) then
  return refuse('unknown_run')
end
local expired = Tasks.expire_leases(ctx, 'leases', Free.VICTIMS)
local staged = Stages.expire(ctx, Free.VICTIMS)
local evaluations = Tasks.expire_leases(ctx, 'eval_leases', Free.VICTIMS) + Burial.bury(Free.VICTIMS)
local engines, workers = Silence.forget_engines(ctx), Silence.forget_workers(ctx)
Run.close(ctx)
local more = Free.portion(ctx) or expired == Free.VICTIMS or engines == Free.VICTIMS or workers == Free.VICTIMS
  or evaluations >= Free.VICTIMS or staged == Free.VICTIMS
local staging, touched = key('staging'), format('%d', ctx.now)
for _, payload in ipairs(call('ZRANGEBYSCORE', staging, 0, 0, 'LIMIT', 0, 1000)) do
  call('ZADD', staging, touched, payload)
end
local stale = call('ZRANGEBYSCORE', staging, '-inf', format('%d', ctx.now - age_ms), 'LIMIT', 0, 1000)
Staging.discard(stale)
return reply('swept', expired + staged + evaluations + engines + workers + #stale, (more or #stale == 1000) and 1 or 0)
