-- Pending tasks that are due. Each environment has a sorted set `pending:<environment>` (score: order of leasing, so
-- -2 * priority, less 1 for what came back; member: entry of Tasks), named in hash `pending_environments` while
-- it is not empty. Those that back off are in the sorted set `delayed` (score: not_before), whatever their environment.
--
-- ctx.pending_named: the named environments, once they were read; pending_left: those that an entry was taken out of.

-- @include ledger
-- @include picking

local Pending = {}

function Pending.key_of(environment)
  return key('pending:' .. environment)
end

function Pending.names(ctx)
  if not ctx.pending_named then
    ctx.pending_named = {}
    for _, environment in ipairs(call('HKEYS', key('pending_environments'))) do
      ctx.pending_named[environment] = true
    end
  end
  return ctx.pending_named
end

function Pending.add(ctx, environment, score, member)
  local named = Pending.names(ctx)
  if not named[environment] then
    named[environment] = true
    call('HSET', key('pending_environments'), environment, 1)
  end
  call('ZADD', Pending.key_of(environment), score, member)
end

function Pending.unname_empty(ctx)
  for environment in pairs(ctx.pending_left) do
    if call('EXISTS', Pending.key_of(environment)) == 0 then
      call('HDEL', key('pending_environments'), environment)
    end
  end
end

-- Takes an entry out, wherever it is.
function Pending.remove(ctx, environment, member)
  if call('ZREM', Pending.key_of(environment), member) == 1 then
    if not ctx.pending_left then
      ctx.pending_left = {}
      ctx.before_close[#ctx.before_close + 1] = Pending.unname_empty
    end
    ctx.pending_left[environment] = true
  else
    call('ZREM', key('delayed'), member)
  end
end

-- Number of pending tasks, those that back off included.
function Pending.count(ctx)
  local count = call('ZCARD', key('delayed'))
  for environment in pairs(Pending.names(ctx)) do
    count = count + call('ZCARD', Pending.key_of(environment))
  end
  return count
end

function Pending.rank(source, member, score)
  return -(source.fixed or floor(-score / 2)), score, tonumber(string.sub(member, 1, 15))
end

-- Limits of starts. A start costs 60,000, and each ms pays starts_per_minute of it back. In an environment's work
-- (Ledger) `debt` is what was not paid back at `at` (ms). Integers alone, so nothing is rounded. At most start_burst
-- starts are owed at once, so in any t ms at most start_burst + t * starts_per_minute / 60,000 begin. The clock is the
-- run's, for all replicas.
Pending.COST = 60000

-- Starts a minute and the burst of an environment that has a limit, else nil.
function Pending.limit_of(ctx, environment)
  local rule = Picking.rule_of(ctx, environment)
  local rate = rule and rule[4] or -1
  if rate > 0 then
    return rate, math.max(rule[5], 1)
  end
end

function Pending.debt(ctx, work, rate)
  return math.max(0, work[5] - (ctx.now - work[6]) * rate)
end

-- How many tasks of the environment may begin now, nil for any number.
function Pending.allowed(ctx, environment)
  local rate, burst = Pending.limit_of(ctx, environment)
  if rate then
    local debt = Pending.debt(ctx, Ledger.work_of(ctx, environment), rate)
    return math.max(0, floor((burst * Pending.COST - debt) / Pending.COST))
  end
end

-- How many of the tasks that are due may begin now.
function Pending.startable(ctx)
  local count = 0
  for environment in pairs(Pending.names(ctx)) do
    local due = call('ZCARD', Pending.key_of(environment))
    count = count + math.min(due, Pending.allowed(ctx, environment) or due)
  end
  return count
end

-- Time in ms until one more may begin, 0 for now.
function Pending.wait_ms(ctx, environment)
  local rate, burst = Pending.limit_of(ctx, environment)
  if not rate then
    return 0
  end
  local debt = Pending.debt(ctx, Ledger.work_of(ctx, environment), rate)
  return math.max(0, math.ceil((debt - (burst - 1) * Pending.COST) / rate))
end

-- A task of the environment begins.
function Pending.take(ctx, environment)
  local rate = Pending.limit_of(ctx, environment)
  local work = Ledger.count_work(ctx, environment, 1, 1)
  if rate then
    work[5], work[6] = Pending.debt(ctx, work, rate) + Pending.COST, ctx.now
  end
end

-- The environment among these that may begin first, its name breaking ties, and the time in ms until it may; '' and 0
-- for none.
function Pending.first_of(ctx, environments)
  local first, wait, indexes = '', 0, environments[2] and Picking.environment_indexes()
  for _, environment in ipairs(environments) do
    local own = Pending.wait_ms(ctx, environment)
    if first == '' or own < wait or own == wait and indexes[environment] < indexes[first] then
      first, wait = environment, own
    end
  end
  return first, wait
end

-- Up to `count` entries that are due, in order of leasing, what the caller gives to Picking.close, and the environments
-- that may not begin as many as they have; the entries are the caller's to take out.
function Pending.pick(ctx, count)
  local sources, limited = {}, {}
  for environment in pairs(Pending.names(ctx)) do
    local source = {
      at = Pending.key_of(environment), environment = environment, rank = Pending.rank,
      -- The priority of all that is in it, nil where each entry has its own.
      fixed = Picking.priority_of(ctx, environment, nil), most = Pending.allowed(ctx, environment),
    }
    if source.most then
      source.size = call('ZCARD', source.at)
      if source.most < source.size then
        limited[#limited + 1] = environment
      end
    end
    sources[#sources + 1] = source
  end
  local members, picking = Picking.pick(ctx, sources, 'lease_stride', count)
  return members, picking, limited
end
