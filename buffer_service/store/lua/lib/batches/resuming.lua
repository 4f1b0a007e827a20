-- A resume, in portions of about VICTIMS groups.
--
-- state.resuming, while a resume is under way: {request_id, step, mode, regenerate (1 or 0), clamped (1 when the ages
-- of queued groups are of the new timeline)}. Its first portion begins the new term, which shuts the old trainer out;
-- until its last one the run is paused as 'resuming' and whoever resumes finishes it first. In between, every group is
-- in exactly one place, ledger and steps agree, and only the queue's caps may be exceeded.

-- @include commit
-- @include gathering
-- @include totals

local Resuming = {}

-- Which weights belong to a step; publishes of the abandoned timeline are forgotten.
function Resuming.rewind_publishes(step)
  local commits, manifests, at_step = key('commits'), key('manifests'), format('%d', step)
  for _, forgotten in ipairs(call('ZRANGEBYSCORE', commits, '(' .. at_step, '+inf')) do
    call('HDEL', manifests, forgotten)
  end
  call('ZREMRANGEBYSCORE', commits, '(' .. at_step, '+inf')
  return tonumber(call('ZREVRANGEBYSCORE', commits, at_step, '-inf', 'LIMIT', 0, 1)[1] or '0')
end

-- More numbers than a store can have lost: the ids that the run gives to tasks, and leases of stages, are counted by
-- them, and whoever still works on a lost one must not be taken for the worker of a new one.
Resuming.LOST_SEQUENCES = 100000000

function Resuming.forgive_loss(ctx)
  local state = ctx.state
  if state.paused == 'store_rolled_back' then
    state.paused = ''
    state.sequence = state.sequence + Resuming.LOST_SEQUENCES
    state.stage_leases = (state.stage_leases or 0) + Resuming.LOST_SEQUENCES
  end
end

function Resuming.begin(ctx, request_id, step, mode, regenerate)
  local state = ctx.state
  if regenerate then
    Remembered.forget_all(ctx)
  end
  state.resuming = {request_id, step, regenerate and 'requeue' or mode, regenerate and 1 or 0, 0}
  state.version = Resuming.rewind_publishes(step)
  Commit.forget_plan()
  Totals.forget_snapshots()
  call('HDEL', RUN, 'trainer')
  state.term = state.term + 1
  state.forks[#state.forks + 1] = {state.term, state.version}
  state.world_size = 0
  Resuming.forgive_loss(ctx)
end

-- Trained steps from `first` on are delivered again, newest first. Returns whether some are left.
function Resuming.replay_steps(ctx, first)
  local state = ctx.state
  local done = 0
  while state.committed_steps > first and done < Free.VICTIMS do
    local step = state.committed_steps - 1
    local header = Batches.load_step(step)
    for _ in pairs(header.environments) do
      done = done + 1
    end
    Batches.move_step(ctx, header, 'trained', 'delivered')
    Reuse.move(ctx, 'trained', 'delivered', header.reused or 0)
    state.retained_bytes = state.retained_bytes - header.bytes
    state.committed_steps = step
    if call('EXISTS', key('kept')) == 1 then
      Batches.each_micro_batch(step, function(groups)
        Reuse.suspend(ctx, groups)
        done = done + #groups
      end)
    end
  end
  return state.committed_steps > first
end

-- Takes a step apart, or a part of it: its groups go back into the queue, or are discarded. Returns what it was worth
-- of the limit, and whether nothing is left of the step.
function Resuming.take_back(ctx, step, mode, limit)
  local state = ctx.state
  local header, from = Batches.load_step(step), Batches.step_state(ctx, step)
  local done = Batches.dismantle(step, header, limit, function(groups, is_reused)
    if is_reused then
      Reuse.move(ctx, from == 'forming' and 'delivered' or from, 'given_back', #groups)
      for _, group in ipairs(groups) do
        Reuse.take_back(ctx, group)
      end
      return
    end
    Batches.count(header, -1, (Batches.sum(groups, header.train_version)))
    for _, group in ipairs(groups) do
      Reuse.disown(ctx, group)
      if from == 'trained' then
        state.retained_bytes = state.retained_bytes - group[G_BYTES]
      end
      if mode == 'discard' then
        Groups.finish(ctx, group, from, 'discarded')
      elseif mode == 'requeue' then
        Groups.queue(ctx, Record.clamp(ctx, group), from)
      else
        error('a resume of mode ' .. mode .. ' takes no step back')
      end
    end
  end)
  local is_empty = Batches.is_empty(header)
  if is_empty then
    Batches.miss(ctx, header, -(header.missing or 0))
    Batches.delete_step(step)
  else
    Batches.save_step(step, header)
  end
  return done, is_empty
end

-- Takes the open step and those from `first` on back, newest first. Returns whether some are left.
function Resuming.take_steps_back(ctx, first, mode)
  local state = ctx.state
  local left = Free.VICTIMS
  if state.micro_batches > 0 then
    local done, is_empty = Resuming.take_back(ctx, state.next_step, mode, left)
    if not is_empty then
      return true
    end
    state.micro_batches = 0
    left = left - done
  end
  while state.next_step > first and left > 0 do
    local step = state.next_step - 1
    local done, is_empty = Resuming.take_back(ctx, step, mode, left)
    left = left - done
    if is_empty then
      state.next_step = step
      state.committed_steps = math.min(state.committed_steps, step)
    end
  end
  return state.next_step > first
end

-- Drops what is beyond the queue's caps, the oldest first. Returns whether more is left to drop.
function Resuming.drop_some(ctx)
  for _ = 1, Free.VICTIMS do
    if Groups.fits_queue(ctx, 0, 0, 0) or not Groups.drop_oldest(ctx, Queue.load_subqueues(ctx)) then
      return false
    end
  end
  return not Groups.fits_queue(ctx, 0, 0, 0)
end

-- A portion of the resume that is under way. Returns whether it has to go on.
function Resuming.go_on(ctx)
  local state = ctx.state
  local resuming = state.resuming
  local _, step, mode, regenerate, clamped = unpack(resuming)
  local first = math.max(step, state.checkpointed_steps)
  if clamped == 0 then
    local left = Free.VICTIMS - Queue.clamp_ages(ctx, state.version, Free.VICTIMS)
    if left <= 0 or Reuse.clamp_heads(state.version, left) >= left then
      return true
    end
    resuming[5] = 1
  end
  if state.gathered then
    Gathering.give_back(ctx)
    return true
  end
  if mode == 'replay' then
    return Resuming.replay_steps(ctx, first)
  elseif mode == 'requeue' then
    -- What the abandoned timeline has trained beyond the checkpoint may have been used again.
    return Resuming.take_steps_back(ctx, first, mode)
      or regenerate == 1 and Reuse.evict(ctx, '+inf', Free.VICTIMS) >= Free.VICTIMS
      or Resuming.drop_some(ctx)
  elseif mode == 'discard' then
    return Resuming.take_steps_back(ctx, first, mode)
  end
  return error('unknown mode of a resume: ' .. mode)
end

-- Steps that still take groups must not ask for versions that the abandoned timeline alone had.
function Resuming.rewind_train_versions(ctx)
  local state = ctx.state
  for number = state.missing and state.committed_steps or state.next_step, state.next_step do
    local header = (number < state.next_step or state.micro_batches > 0) and Batches.load_step(number)
    if header and (header.missing or number == state.next_step) then
      header.train_version = math.min(header.train_version, Timeline.train_version_of(ctx, number))
      Batches.save_step(number, header)
    end
  end
end

-- The resume is done: the run stands at its step. Returns the facts of its reply after the revision.
function Resuming.finish(ctx)
  local state = ctx.state
  local request_id, step, _, regenerate = unpack(state.resuming)
  if regenerate == 1 then
    state.checkpointed_steps, state.freed_steps, state.next_step = step, step, step
  end
  state.committed_steps = math.min(state.committed_steps, step)
  state.published_steps = step
  Resuming.rewind_train_versions(ctx)
  state.resuming = nil
  Resuming.forgive_loss(ctx)
  state.revision = math.max(state.revision, state.seen)
  state.seen = 0
  local feeder = call('HGET', RUN, 'feeder') or ''
  local facts = {state.term, step, state.next_step, state.version, state.cursor, feeder}
  call('HSET', RUN, 'last_resume', pack({request_id, unpack(facts)}))
  return facts
end
