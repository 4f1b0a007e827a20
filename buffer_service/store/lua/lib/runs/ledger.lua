-- Both ledgers. Every change of state of a group or a task goes through Ledger.move_groups or Ledger.move_task, which
-- refuse what the transition tables (rendered from rules/transitions.py) do not have.
--
-- ledger.groups: {accepted and every state = {groups, samples, tokens, bytes}}; ledger.tasks: {submitted and every
-- state = count}; ledger.statistics: the fields of the wire's RunStatistics. Hash `env_ledger` has the groups' ledger
-- of each environment, without the states that never held anything, and beside them as `totals` the environment's own,
-- an array in the order of ENVIRONMENT_TOTALS; it is read when it is needed and written at the end.

-- @include run
-- @include total_places
-- @include transitions

local Ledger = {}

function Ledger.check_move(kind, transitions, from, to)
  if not string.find(transitions, ' ' .. from .. '>' .. to .. ' ', 1, true) then
    -- A defect of a script, never of a request: the script ends here.
    error(format('illegal transition of a %s: %s to %s', kind, from, to))
  end
end

function Ledger.add_amount(amount, sign, groups, samples, tokens, bytes)
  amount[A_GROUPS] = amount[A_GROUPS] + sign * groups
  amount[A_SAMPLES] = amount[A_SAMPLES] + sign * samples
  amount[A_TOKENS] = amount[A_TOKENS] + sign * tokens
  amount[A_BYTES] = amount[A_BYTES] + sign * bytes
end

function Ledger.write_amounts(ctx)
  local written = {}
  for environment, amounts in pairs(ctx.amounts) do
    written[#written + 1] = environment
    written[#written + 1] = pack(amounts)
  end
  if #written > 0 then
    call('HSET', key('env_ledger'), unpack(written))
  end
end

-- The amounts that this call has read, by environment: ctx.amounts.
function Ledger.known_amounts(ctx)
  if not ctx.amounts then
    ctx.amounts = {}
    ctx.before_close[#ctx.before_close + 1] = Ledger.write_amounts
  end
  return ctx.amounts
end

function Ledger.amounts_of(ctx, environment)
  local known = Ledger.known_amounts(ctx)
  local amounts = known[environment]
  if not amounts then
    local raw = call('HGET', key('env_ledger'), environment)
    amounts = raw and unpack_msg(raw) or {}
    known[environment] = amounts
  end
  return amounts
end

-- Reads the amounts of all environments that a table has as keys, in one call.
function Ledger.load_amounts(ctx, by_environment)
  local known, missing = Ledger.known_amounts(ctx), {}
  for environment in pairs(by_environment) do
    if not known[environment] then
      missing[#missing + 1] = environment
    end
  end
  if #missing > 0 then
    for index, raw in ipairs(call('HMGET', key('env_ledger'), unpack(missing))) do
      known[missing[index]] = raw and unpack_msg(raw) or {}
    end
  end
end

-- The totals of an environment, to be added to; the first is accepted_response_tokens.
function Ledger.environment_totals(ctx, environment)
  local amounts = Ledger.amounts_of(ctx, environment)
  if not amounts.totals then
    amounts.totals = {}
    for place = 1, #ENVIRONMENT_TOTALS do
      amounts.totals[place] = 0
    end
  end
  return amounts.totals
end

-- Work on the queue's tasks of an environment, of hash `env_work`: {starts, failed_attempts, failed_tasks,
-- failed_samples, debt, at}; the last two are a limit's (Pending). Of those that this call has read: ctx.work; that it
-- has changed: ctx.worked.
function Ledger.work_of(ctx, environment)
  ctx.work = ctx.work or {}
  local work = ctx.work[environment]
  if not work then
    local raw = call('HGET', key('env_work'), environment)
    work = raw and unpack_msg(raw) or {0, 0, 0, 0, 0, 0}
    ctx.work[environment] = work
  end
  return work
end

function Ledger.write_work(ctx)
  local written = {}
  for environment in pairs(ctx.worked) do
    written[#written + 1] = environment
    written[#written + 1] = pack(ctx.work[environment])
  end
  call('HSET', key('env_work'), unpack(written))
end

-- Adds to one of the counts, 1 to 4; returns the work.
function Ledger.count_work(ctx, environment, place, by)
  if not ctx.worked then
    ctx.worked = {}
    ctx.before_close[#ctx.before_close + 1] = Ledger.write_work
  end
  ctx.worked[environment] = true
  local work = Ledger.work_of(ctx, environment)
  work[place] = work[place] + by
  return work
end

function Ledger.quotas_set(ctx)
  local policy = ctx.policy
  return policy.quota_groups + policy.quota_tokens + policy.quota_bytes > 0
end

function Ledger.shift(amounts, from, to, groups, samples, tokens, bytes)
  local left = from == 'new' and 'accepted' or from
  amounts[left] = amounts[left] or {0, 0, 0, 0}
  amounts[to] = amounts[to] or {0, 0, 0, 0}
  Ledger.add_amount(amounts[left], from == 'new' and 1 or -1, groups, samples, tokens, bytes)
  Ledger.add_amount(amounts[to], 1, groups, samples, tokens, bytes)
end

-- Moves groups of an environment, of these sizes, from one state to another; from 'new' accepts them.
function Ledger.move_groups(ctx, from, to, environment, groups, samples, tokens, bytes)
  Ledger.check_move('group', GROUP_TRANSITIONS, from, to)
  Ledger.shift(ctx.ledger.groups, from, to, groups, samples, tokens, bytes)
  Ledger.shift(Ledger.amounts_of(ctx, environment), from, to, groups, samples, tokens, bytes)
  if from ~= 'new' and Ledger.quotas_set(ctx) then
    ctx.topics.space = true
  end
  ctx.changed = true
end

-- Moves a task record to another state; from 'new' submits it.
function Ledger.move_task(ctx, task, to)
  Ledger.check_move('task', TASK_TRANSITIONS, task.state, to)
  local counts = ctx.ledger.tasks
  if task.state == 'new' then
    counts.submitted = counts.submitted + 1
  else
    counts[task.state] = counts[task.state] - 1
  end
  counts[to] = counts[to] + 1
  task.state = to
  ctx.changed = true
end
