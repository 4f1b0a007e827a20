-- Housekeeping of a run: ends leases that are past their expiry, frees what was released, gives up payloads that were
-- staged and never indexed, forgets engines and idle workers that are silent. Any number of replicas may sweep at once.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {age_ms}: how long a payload may be staged
-- Replies {'swept', done, more} | {'error', 'unknown_run'}
-- Complexity O(1000)

-- @include burial
-- @include commit
-- @include evaluations
-- @include silence
-- @include staging

local request = unpack_msg(ARGV[1])
relieve()
if not begin_run() then
  return refuse('unknown_run')
end
local expired = expire_leases(VICTIMS)
local evaluations = expire_evaluations(VICTIMS) + bury_evaluations(VICTIMS)
local engines, workers = forget_engines(), forget_workers()
close_run()
local more = free_some() or expired == VICTIMS or engines == VICTIMS or workers == VICTIMS
  or evaluations >= VICTIMS
local staging, touched = key('staging'), format('%d', now)
for _, payload in ipairs(call('ZRANGEBYSCORE', staging, 0, 0, 'LIMIT', 0, 1000)) do
  call('ZADD', staging, touched, payload)
end
local stale = call('ZRANGEBYSCORE', staging, '-inf', format('%d', now - request[1]), 'LIMIT', 0, 1000)
discard_staged(stale)
return reply('swept', expired + evaluations + engines + workers + #stale, (more or #stale == 1000) and 1 or 0)
