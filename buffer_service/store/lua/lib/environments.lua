-- The environments of a run: sorted set `environments` holds those of all its tasks and accepted groups, all with score
-- 0, so that its order is that of their bytes.

-- @include run
-- @include bounds

local ENVIRONMENTS = key('environments')
local known_environments, environments_left = {}, nil

-- Whether the run has the environment already.
local function is_known(environment)
  if known_environments[environment] == nil then
    known_environments[environment] = call('ZSCORE', ENVIRONMENTS, environment) and true or false
  end
  return known_environments[environment]
end

-- Whether a thing of the environment may join the run.
local function environment_fits(environment)
  if is_known(environment) then
    return true
  end
  environments_left = environments_left or MAX_ENVIRONMENTS - call('ZCARD', ENVIRONMENTS)
  return environments_left > 0
end

local function know_environment(environment)
  if not is_known(environment) then
    known_environments[environment] = true
    call('ZADD', ENVIRONMENTS, 0, environment)
    environments_left = environments_left and environments_left - 1
  end
end
