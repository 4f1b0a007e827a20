-- What an operator does to a run: holds it, lets it drain, or lets it go on.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {'pause' | 'drain' | 'continue'}
-- Replies {'ok', revision} | {'error', 'unknown_run'}
-- Complexity O(1)

-- @include ledger

local ctx = Run.context()
local action = unpack_msg(ARGV[1])[1]

Run.relieve()
if not Run.begin(ctx) then
  return refuse('unknown_run')
end
local state, topics = ctx.state, ctx.topics
local held, draining = state.held, state.draining
if action == 'pause' then
  held = true
elseif action == 'drain' then
  draining = true
elseif action == 'continue' then
  held, draining = false, false
else
  error('unknown control of a run: ' .. action)
end
if held ~= state.held or draining ~= state.draining then
  state.held, state.draining = held, draining
  ctx.changed = true
  Run.recompute_pause(ctx)
  topics.groups, topics.tasks, topics.space, topics.weights = true, true, true, true
end
return reply('ok', Run.close(ctx))
