-- Who waits on whom: the line of blocked pushes, the leases that expire first, the workers that asked for leases last,
-- and what admission goes by. Writes nothing.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {limit}
-- Replies {'waits', revision, now, policy, waiting, pushes, leased, leases, workers, asked, clock, needed}; waiting,
--         leased and workers are counts; pushes: {payload key, ms of joining the line (0: a ticket from before tickets
--         were times), ms of the last try}; leases as Inspecting.describe_task; asked: {worker_id,
--         instance_id, ms of the last request, leases}; clock: {queued, forming, target of the open step, version,
--         next_step, published_steps, due, backing off, a controller's lookahead_milli or -1, groups that complete
--         steps lack, those due that limits of starts let begin now}; needed: of the last pull that was short, 0: none
--         has been
--       | {'error', 'unknown_run'}
-- Complexity O(subqueues + environments + limit * log waiting)

-- @include inspecting
-- @include waiting

local ctx = Run.context()
local limit = unpack_msg(ARGV[1])[1]
if not Run.load(ctx) then
  return refuse('unknown_run')
end
local state = ctx.state

local function first_of(at, command)
  return call(command, at, 0, limit - 1, 'WITHSCORES')
end

local pushes, leases, asked = {}, {}, {}
local flat = first_of(key('waiting'), 'ZRANGE')
for index = 1, #flat, 2 do
  local tried = call('ZSCORE', key('staging'), flat[index])
  local since = math.min(ctx.now, tonumber(flat[index + 1]))
  if since < state.created_ms then
    since = 0
  end
  pushes[#pushes + 1] = {flat[index], since, tonumber(tried or '0')}
end
flat = first_of(key('leases'), 'ZRANGE')
for index = 1, #flat, 2 do
  leases[#leases + 1] = Inspecting.describe_lease(ctx, flat[index], tonumber(flat[index + 1]))
end
flat = first_of(key('workers_heard'), 'ZREVRANGE')
for index = 1, #flat, 2 do
  local worker_id = flat[index]
  local raw = call('HGET', key('workers'), worker_id)
  asked[#asked + 1] = {
    worker_id, raw and unpack_msg(raw)[1] or '', tonumber(flat[index + 1]), call('SCARD', key('held:' .. worker_id)),
  }
end

local forming, target = 0, 0
if state.micro_batches > 0 then
  local open = Batches.load_step(state.next_step)
  forming, target = open.groups, open.target
end
local backing_off = call('ZCARD', key('delayed'))
local clock = {
  Queue.total(ctx), forming, target, state.version, state.next_step, state.published_steps,
  Pending.count(ctx) - backing_off, backing_off, ctx.policy.lookahead_milli or -1, state.missing or 0,
  Pending.startable(ctx),
}
local needed = call('HGET', RUN, 'needed')
return reply('waits', state.revision, ctx.now, ctx.policy, call('ZCARD', key('waiting')), pushes,
  call('ZCARD', key('leases')), leases,
  call('ZCARD', key('workers_heard')), asked, clock, tonumber(needed or '0'))
