-- The environments of a run: sorted set `environments` holds those of all its tasks and accepted groups, all with score
-- 0, so that its order is that of their bytes.
--
-- ctx.environments: whether the run has them, of those that this call asked for; environments_left: how many more may
-- join the run, nil while nobody asked.

-- @include run

local Environments = {}

-- Whether the run has the environment already.
function Environments.is_known(ctx, environment)
  ctx.environments = ctx.environments or {}
  local known = ctx.environments
  if known[environment] == nil then
    known[environment] = call('ZSCORE', key('environments'), environment) and true or false
  end
  return known[environment]
end

-- Whether a thing of the environment may join the run.
function Environments.fits(ctx, environment)
  if Environments.is_known(ctx, environment) then
    return true
  end
  ctx.environments_left = ctx.environments_left or MAX_ENVIRONMENTS - call('ZCARD', key('environments'))
  return ctx.environments_left > 0
end

function Environments.know(ctx, environment)
  if not Environments.is_known(ctx, environment) then
    ctx.environments[environment] = true
    call('ZADD', key('environments'), 0, environment)
    ctx.environments_left = ctx.environments_left and ctx.environments_left - 1
  end
end
