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

-- Estimated train_version of the next unassembled step.
local function next_train_version()
  return state.version + floor((state.next_step - state.published_steps) / policy.batches_per_publish)
end
