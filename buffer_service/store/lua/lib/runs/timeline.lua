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

-- Estimated train_version of the next unassembled step.
function Timeline.next_train_version(ctx)
  local state = ctx.state
  return state.version + floor((state.next_step - state.published_steps) / ctx.policy.batches_per_publish)
end
