-- Versions across resumes, as in domain/timeline.py.

-- @include run

local Timeline = {}

-- What (term, version) counts as in the present timeline: min(version, f of every fork of a later term).
function Timeline.effective(ctx, term, version)
  for _, fork in ipairs(ctx.state.forks) do
    if fork[1] > term and fork[2] < version then
      version = fork[2]
    end
  end
  return version
end

-- The same of a mean version in thousandths.
function Timeline.effective_milli(ctx, term, milli)
  for _, fork in ipairs(ctx.state.forks) do
    if fork[1] > term and 1000 * fork[2] < milli then
      milli = 1000 * fork[2]
    end
  end
  return milli
end

-- Estimated train_version of a step that no publish covers.
function Timeline.train_version_of(ctx, step)
  local state = ctx.state
  return state.version + floor((step - state.published_steps) / ctx.policy.batches_per_publish)
end

-- The least train_version for which groups are wanted: that of the next unassembled step, or of a complete one that
-- lacks groups.
function Timeline.first_train_version(ctx)
  local state = ctx.state
  local version = Timeline.train_version_of(ctx, state.next_step)
  for step = state.missing and state.committed_steps or state.next_step, state.next_step - 1 do
    local header = unpack_msg(call('HGET', key('steps'), format('%d', step)))
    if header.missing then
      return math.min(version, header.train_version)
    end
  end
  return version
end
