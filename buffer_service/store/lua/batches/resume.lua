-- A trainer takes the run over: a new term, the clock set back to next_step, a roll-back forgiven.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {next_step (-1: after the last committed step), 'replay' | 'requeue' | 'discard', request_id,
--         allow_regenerate}
-- Replies {'resumed', revision, term, next_step, next_unassembled_step, version, cursor, feeder_state}
--       | {'more'}: released steps are still being freed, or this resume or an earlier one has to go on; call again
--       | {'error', 'unknown_run' | 'step_ahead' | 'replay_gap', ...}
-- Complexity O(subqueues + 256 groups * log queued)

-- @include resuming

local ctx = Run.context()
local request = unpack_msg(ARGV[1])
local step, mode, request_id, allow_regenerate = unpack(request, 1, 4)

Run.relieve()
if not Run.begin(ctx) then
  return refuse('unknown_run')
end
local state, topics = ctx.state, ctx.topics

if not state.resuming then
  local last = call('HGET', RUN, 'last_resume')
  if last then
    last = unpack_msg(last)
    if last[1] == request_id then
      return reply('resumed', Run.close(ctx), unpack(last, 2, 7))
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
  if Free.portion(ctx) then
    return reply('more')
  end
  Resuming.begin(ctx, request_id, step, mode, regenerate)
  -- What is in flight is not waited for: its versions may be abandoned ones.
  call('DEL', key('lease_heads'))
  call('HDEL', RUN, 'stale_wait', 'late_wait', 'refused', 'decided_at', 'held')
end

ctx.changed = true
if Resuming.go_on(ctx) then
  Run.recompute_pause(ctx)
  Run.close(ctx, true)
  return reply('more')
end
local is_mine = state.resuming[1] == request_id
local facts = Resuming.finish(ctx)
Run.recompute_pause(ctx)
topics.groups, topics.tasks, topics.space, topics.weights = true, true, true, true
local revision = Run.close(ctx)
if is_mine then
  return reply('resumed', revision, unpack(facts))
end
return reply('more')
