-- Committing steps, and releasing what is beyond retention.
--
-- state.retained_bytes: sizes of the groups of the steps in [checkpointed_steps, committed_steps).

-- @include free

local Commit = {}

-- A resume that goes on in portions lets no trainer in before it is done.
function Commit.check_trainer(ctx)
  if ctx.state.resuming then
    return refuse('run_paused', 'resuming')
  end
  return Run.check_rolled_back(ctx)
end

-- The collective update that is under way has ended, or never will.
function Commit.forget_plan()
  call('HDEL', RUN, 'plan', 'plan_version')
end

-- Forgets publishes that no resume can go back to: all before the newest one at or before checkpointed_steps.
function Commit.prune_publishes(ctx)
  local commits, manifests = key('commits'), key('manifests')
  local floor_entry = call('ZREVRANGEBYSCORE', commits, format('%d', ctx.state.checkpointed_steps), '-inf',
    'WITHSCORES', 'LIMIT', 0, 1)
  if not floor_entry[1] then
    return
  end
  local oldest = tonumber(floor_entry[1])
  call('ZREMRANGEBYSCORE', commits, '-inf', '(' .. floor_entry[2])
  for _, version in ipairs(call('HKEYS', manifests)) do
    if tonumber(version) < oldest then
      call('HDEL', manifests, version)
    end
  end
end

-- Steps below `steps`, and the tombstones of tasks that have ended outside of steps, may be freed from now on.
function Commit.release_steps(ctx, steps)
  local state = ctx.state
  if steps > state.checkpointed_steps then
    for step = state.checkpointed_steps, steps - 1 do
      state.retained_bytes = state.retained_bytes - Batches.load_step(step).bytes
    end
    state.checkpointed_steps = steps
    ctx.changed = true
    Commit.prune_publishes(ctx)
  end
  if state.ended_through < state.ended_sequence and call('ZCARD', key('ended')) > 0 then
    state.ended_through = state.ended_sequence
    ctx.changed = true
  end
end

-- Steps below this one are beyond what the policy retains.
function Commit.beyond_retention(ctx)
  local state, policy = ctx.state, ctx.policy
  local first = math.max(state.checkpointed_steps, state.committed_steps - policy.retained_steps)
  if policy.max_retained_bytes == 0 then
    return first
  end
  local bytes, by_bytes = state.retained_bytes, state.checkpointed_steps
  while by_bytes < state.committed_steps and bytes > policy.max_retained_bytes do
    bytes = bytes - Batches.load_step(by_bytes).bytes
    by_bytes = by_bytes + 1
  end
  return math.max(first, by_bytes)
end

-- Settles the steps below `steps` as trained, and releases what is beyond retention.
function Commit.commit_steps(ctx, steps)
  local state = ctx.state
  if steps <= state.committed_steps then
    return
  end
  for step = state.committed_steps, steps - 1 do
    local header = Batches.load_step(step)
    if header.missing then
      Batches.miss(ctx, header, -header.missing)
      Batches.save_step(step, header)
    end
    Batches.move_step(ctx, header, 'delivered', 'trained')
    Reuse.move(ctx, 'delivered', 'trained', header.reused or 0)
    state.retained_bytes = state.retained_bytes + header.bytes
  end
  local first_trained = state.committed_steps
  state.committed_steps = steps
  if Reuse.is_on(ctx) then
    for step = first_trained, steps - 1 do
      Batches.each_micro_batch(step, function(groups)
        Reuse.keep(ctx, step, groups)
      end)
    end
  end
  ctx.changed = true
  Run.record(ctx, 'trained', {ctx.now, steps})
  local first = Commit.beyond_retention(ctx)
  if first > state.checkpointed_steps then
    Commit.release_steps(ctx, first)
  end
end
