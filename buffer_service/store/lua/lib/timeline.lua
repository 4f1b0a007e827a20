-- Versions across resumes, as in domain/timeline.py.

-- @include run

-- What (epoch, version) counts as in the present timeline: min(version, f of every fork of a later epoch).
local function effective(epoch, version)
  for _, fork in ipairs(state.forks) do
    if fork[1] > epoch and fork[2] < version then
      version = fork[2]
    end
  end
  return version
end

-- The same of a mean version in thousandths.
local function effective_milli(epoch, milli)
  for _, fork in ipairs(state.forks) do
    if fork[1] > epoch and 1000 * fork[2] < milli then
      milli = 1000 * fork[2]
    end
  end
  return milli
end

-- Estimated train_version of the next unassembled step.
local function next_train_version()
  return state.version + floor((state.next_step - state.published_steps) / policy.batches_per_publish)
end
