-- Starts of environments: leases given of the queue's tasks, and how many more a rule's starts_per_minute allow now.
--
-- Hash `env_work`, by environment: {starts, failed_attempts, failed_tasks, failed_samples, debt, at}. The last two are a
-- token bucket. A start costs 60,000, and each ms pays starts_per_minute of it back; `debt` is what was not paid back at
-- `at` (ms). Integers alone, so nothing is rounded. At most start_burst starts are owed at once, so in any t ms at most
-- start_burst + t * starts_per_minute / 60,000 begin. The clock is the run's, for all replicas.
--
-- ctx.work: records that this call has read, by environment; ctx.worked: those that it has changed.

-- @include run
-- @include picking

local Starts = {}

Starts.COST = 60000

function Starts.write(ctx)
  local written = {}
  for environment in pairs(ctx.worked) do
    written[#written + 1] = environment
    written[#written + 1] = pack(ctx.work[environment])
  end
  call('HSET', key('env_work'), unpack(written))
end

function Starts.of(ctx, environment)
  ctx.work = ctx.work or {}
  local work = ctx.work[environment]
  if not work then
    local raw = call('HGET', key('env_work'), environment)
    work = raw and unpack_msg(raw) or {0, 0, 0, 0, 0, 0}
    ctx.work[environment] = work
  end
  return work
end

-- Adds to one of an environment's counts: starts, failed_attempts, failed_tasks, failed_samples are 1 to 4.
function Starts.count(ctx, environment, place, by)
  if not ctx.worked then
    ctx.worked = {}
    ctx.before_close[#ctx.before_close + 1] = Starts.write
  end
  ctx.worked[environment] = true
  local work = Starts.of(ctx, environment)
  work[place] = work[place] + by
  return work
end

-- Starts a minute and the burst of an environment that has a limit, else nil.
function Starts.limit_of(ctx, environment)
  local rule = Picking.rule_of(ctx, environment)
  local rate = rule and rule[4] or -1
  if rate > 0 then
    return rate, math.max(rule[5], 1)
  end
end

function Starts.debt(ctx, work, rate)
  return math.max(0, work[5] - (ctx.now - work[6]) * rate)
end

-- How many tasks of the environment may begin now, nil for any number.
function Starts.allowed(ctx, environment)
  local rate, burst = Starts.limit_of(ctx, environment)
  if rate then
    local debt = Starts.debt(ctx, Starts.of(ctx, environment), rate)
    return math.max(0, floor((burst * Starts.COST - debt) / Starts.COST))
  end
end

-- Time in ms until one more may begin, 0 for now.
function Starts.wait_ms(ctx, environment)
  local rate, burst = Starts.limit_of(ctx, environment)
  if not rate then
    return 0
  end
  local debt = Starts.debt(ctx, Starts.of(ctx, environment), rate)
  return math.max(0, math.ceil((debt - (burst - 1) * Starts.COST) / rate))
end

-- A task of the environment begins.
function Starts.take(ctx, environment)
  local rate = Starts.limit_of(ctx, environment)
  local work = Starts.count(ctx, environment, 1, 1)
  if rate then
    work[5], work[6] = Starts.debt(ctx, work, rate) + Starts.COST, ctx.now
  end
end

-- The environment among these that may begin first, its name breaking ties, and the time in ms until it may; '' and 0
-- for none.
function Starts.first_of(ctx, environments)
  local first, wait, indexes = '', 0, environments[2] and Picking.environment_indexes()
  for _, environment in ipairs(environments) do
    local own = Starts.wait_ms(ctx, environment)
    if first == '' or own < wait or own == wait and indexes[environment] < indexes[first] then
      first, wait = environment, own
    end
  end
  return first, wait
end
