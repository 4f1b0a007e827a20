-- A trainer takes the run over: a new epoch, the clock set back to next_step, a pause cleared.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {next_step (-1: after the last committed step), 'replay' | 'requeue' | 'discard', request_id,
--         allow_regenerate}
-- Replies {'resumed', revision, epoch, next_step, next_unassembled_step, version, cursor, feeder_state}
--       | {'more'}: released steps are still being freed; call again
--       | {'error', 'unknown_run' | 'step_ahead' | 'replay_gap', ...}
-- Complexity O(queued groups newer than the fork + groups of the steps taken back); one atomic call whatever their
-- number

-- @include commit

local request = unpack_msg(ARGV[1])
local step, mode, request_id, allow_regenerate = unpack(request, 1, 4)

relieve()
if not begin_run() then
  return refuse('unknown_run')
end
local last = call('HGET', RUN, 'last_resume')
if last then
  last = unpack_msg(last)
  if last[1] == request_id then
    return reply('resumed', close_run(), unpack(last, 2, 7))
  end
end

if step == -1 then
  step = state.committed_steps
end
if step > state.next_step then
  return refuse('step_ahead', step, state.next_step)
end
local regenerate = step < state.checkpointed_steps
if regenerate and allow_regenerate ~= 1 then
  return refuse('replay_gap', step, state.checkpointed_steps)
end
if free_some() then
  return reply('more')
end

-- Takes an assembled step apart: its groups go back into the queue, or are discarded.
local function take_back(taken)
  local header = load_step(taken)
  local from = step_state(taken)
  for _, group in ipairs(step_groups(taken, header)) do
    if mode == 'discard' then
      end_group(group, from, 'discarded')
    else
      queue_group(clamp(group), from)
    end
  end
  state.assembled_now = state.assembled_now - header.groups
  delete_step(taken, header)
end

local first = math.max(step, state.checkpointed_steps)
if regenerate then
  mode = 'requeue'
end

-- Which weights belong to the step. The queue's heads follow before any group joins it in the new timeline.
local commits = key('commits')
local at_step = format('%d', step)
local version = tonumber(call('ZREVRANGEBYSCORE', commits, at_step, '-inf', 'LIMIT', 0, 1)[1] or '0')
local manifests = key('manifests')
for _, forgotten in ipairs(call('ZRANGEBYSCORE', commits, '(' .. at_step, '+inf')) do
  call('HDEL', manifests, forgotten)
end
call('ZREMRANGEBYSCORE', commits, '(' .. at_step, '+inf')
state.epoch = state.epoch + 1
state.version = version
state.forks[#state.forks + 1] = {state.epoch, version}
local newer = call('ZRANGEBYSCORE', QUEUE_HEADS, format('(%d', version), '+inf')
for _, member in ipairs(newer) do
  call('ZADD', QUEUE_HEADS, format('%d', version), member)
end

if mode == 'replay' then
  for replayed = first, state.committed_steps - 1 do
    move_step(load_step(replayed), 'trained', 'delivered')
  end
else
  for taken = first, state.next_step - 1 do
    take_back(taken)
  end
  if mode == 'requeue' then
    drop_oldest_until_fits(0, 0, 0)
  end
  state.next_step = step
end
if regenerate then
  state.checkpointed_steps, state.freed_steps = step, step
  state.assembled_now = step * policy.batch_groups
end
state.committed_steps = math.min(state.committed_steps, step)
state.published_steps = step
state.world_size = 0
state.paused = ''
recheck_budget()
state.revision = math.max(state.revision, state.seen)
state.seen = 0
changed = true
topics.groups, topics.tasks, topics.space, topics.weights = true, true, true, true

local feeder = call('HGET', RUN, 'feeder') or ''
local revision = close_run()
call('HSET', RUN, 'last_resume', pack({request_id, state.epoch, step, state.next_step, version, state.cursor, feeder}))
return reply('resumed', revision, state.epoch, step, state.next_step, version, state.cursor, feeder)
