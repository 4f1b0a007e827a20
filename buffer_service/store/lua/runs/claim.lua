-- Says with which revision a run came to a server, and whether that is behind what was acknowledged. A process calls
-- it before anything else that it does to the run on that server: the first one to come finds the revision as the
-- server got it, and the others are compared with that, however far the run has moved on by then. A run of an older
-- version of the service also gets the fields of the policy that it lacks, which scripts take to be there, and a
-- secret.
--
-- KEYS[1] rb:{R}:run; its fields server, survived (the revision that the run had when that server came to it) and
--         survived_term (its term then: a resume has settled since what was lost)
-- ARGV[1] {server (which time as a primary of which life of a server), seen (highest revision that the process has
--         acknowledged, 0 for none), secret, torn (1: a script of the run ended in the middle, which pauses it)}
-- Replies {'claimed'} | {'error', 'unknown_run'} | {'error', 'store_rolled_back', ...}, the run is then paused
-- Complexity O(1)

-- @include run
-- @include policy_defaults

local ctx = Run.context()
local server, seen, secret, torn = unpack(unpack_msg(ARGV[1]), 1, 4)
if not Run.load(ctx) then
  return refuse('unknown_run')
end
ctx.policy = ctx.stated
local lacks = false
for name, value in pairs(POLICY_DEFAULTS) do
  if ctx.policy[name] == nil then
    ctx.policy[name] = value
    lacks = true
  end
end
if not ctx.secret then
  Run.relieve()
  call('HSET', RUN, 'secret', secret)
end
if lacks then
  Run.relieve()
  call('HSET', RUN, 'policy', pack(ctx.policy))
end
local known = call('HMGET', RUN, 'server', 'survived', 'survived_term')
local survived, term = tonumber(known[2] or 0), tonumber(known[3] or 0)
if known[1] ~= server then
  survived, term = ctx.state.revision, ctx.state.term
  Run.relieve()
  call('HSET', RUN, 'server', server, 'survived', format('%d', survived), 'survived_term', format('%d', term))
end
if torn == 1 then
  return Run.roll_back(ctx, math.max(seen, ctx.state.revision + 1))
end
if seen > survived and ctx.state.term == term then
  Run.roll_back(ctx, math.max(seen, ctx.state.revision + 1))
  return refuse('store_rolled_back', seen, survived)
end
return reply('claimed')
