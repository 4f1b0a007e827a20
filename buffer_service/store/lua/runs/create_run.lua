-- Creates a run.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {policy, revision to begin with, secret}; policy: a map of integers, names, and environments {{name, share,
--         priority, and where there is a limit starts_per_minute, start_burst}, ...}
-- Replies {'created'} | {'exists', policy} | {'error', 'deleting'}
-- Complexity O(1)

-- @include ledger
-- @include states
-- @include statistics

local ctx = Run.context()
local request = unpack_msg(ARGV[1])

if Run.load(ctx) then
  return reply('exists', ctx.stated)
elseif call('EXISTS', key('deleting')) == 1 then
  return refuse('deleting')
end

local revision
ctx.policy, revision, ctx.secret = unpack(request, 1, 3)
Run.read_clock(ctx)
ctx.ledger = {groups = {}, tasks = {}, statistics = STATISTICS}
for name in string.gmatch('accepted ' .. GROUP_STATES, '%S+') do
  ctx.ledger.groups[name] = {0, 0, 0, 0}
end
for name in string.gmatch('submitted ' .. TASK_STATES, '%S+') do
  ctx.ledger.tasks[name] = 0
end
-- The first revision is the time in microseconds. By it a run of a deleted one's name gives other ids to its tasks, so
-- that late results for the former's are not taken for those of its own.
ctx.state = {
  revision = revision, forgotten = revision, seen = 0, created_ms = ctx.now, paused = '', held = false,
  draining = false, last_error = '', term = 1, version = 0, forks = {}, world_size = 0, cursor = 0,
  next_step = 0, micro_batches = 0, committed_steps = 0, checkpointed_steps = 0, freed_steps = 0, published_steps = 0,
  sequence = floor(revision / 1000000) % 1000000 * 100000000, tickets = 0, ended_sequence = 0, ended_through = 0,
  retained_bytes = 0,
}
call('HSET', RUN, 'layout', '$SCHEMA_VERSION', 'policy', pack(ctx.policy), 'now', format('%d', ctx.now),
  'secret', ctx.secret)
Run.write(ctx)
Run.mark_policy(ctx.policy)
return reply('created')
