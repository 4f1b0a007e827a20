-- Both ledgers. Every change of state of a group or a task goes through `move_group` or `move_task`, which refuse what
-- the transition tables (rendered from domain/transitions.py) do not have.
--
-- ledger.groups: {accepted and every state = {groups, samples, tokens, bytes}}; ledger.tasks: {submitted and every
-- state = count}; ledger.statistics: the fields of the wire's RunStatistics. Hash `env_ledger` has the groups' ledger
-- of each environment, without the states that never held anything, and beside them as `totals` the environment's own,
-- an array in the order of ENVIRONMENT_TOTALS; it is read when it is needed and written at the end.

-- @include run
-- @include total_places
-- @include transitions

local function check_move(kind, transitions, from, to)
  if not string.find(transitions, ' ' .. from .. '>' .. to .. ' ', 1, true) then
    -- A defect of a script, never of a request: the script ends here.
    error(format('illegal transition of a %s: %s to %s', kind, from, to))
  end
end

local function add_amount(amount, sign, groups, samples, tokens, bytes)
  amount[1] = amount[1] + sign * groups
  amount[2] = amount[2] + sign * samples
  amount[3] = amount[3] + sign * tokens
  amount[4] = amount[4] + sign * bytes
end

local ENV_LEDGER = key('env_ledger')
local environment_amounts = {}

local function amounts_of(environment)
  local amounts = environment_amounts[environment]
  if not amounts then
    local raw = call('HGET', ENV_LEDGER, environment)
    amounts = raw and unpack_msg(raw) or {}
    environment_amounts[environment] = amounts
  end
  return amounts
end

-- Reads the amounts of all environments that a table has as keys, in one call.
local function load_amounts(by_environment)
  local missing = {}
  for environment in pairs(by_environment) do
    if not environment_amounts[environment] then
      missing[#missing + 1] = environment
    end
  end
  if #missing > 0 then
    for index, raw in ipairs(call('HMGET', ENV_LEDGER, unpack(missing))) do
      environment_amounts[missing[index]] = raw and unpack_msg(raw) or {}
    end
  end
end

before_close[#before_close + 1] = function()
  local written = {}
  for environment, amounts in pairs(environment_amounts) do
    written[#written + 1] = environment
    written[#written + 1] = pack(amounts)
  end
  if #written > 0 then
    call('HSET', ENV_LEDGER, unpack(written))
  end
end

-- The totals of an environment, to be added to; the first is accepted_response_tokens.
local function environment_totals(environment)
  local amounts = amounts_of(environment)
  if not amounts.totals then
    amounts.totals = {}
    for place = 1, #ENVIRONMENT_TOTALS do
      amounts.totals[place] = 0
    end
  end
  return amounts.totals
end

local function quotas_set()
  return policy.quota_groups + policy.quota_tokens + policy.quota_bytes > 0
end

local function shift(amounts, from, to, groups, samples, tokens, bytes)
  local left = from == 'new' and 'accepted' or from
  amounts[left] = amounts[left] or {0, 0, 0, 0}
  amounts[to] = amounts[to] or {0, 0, 0, 0}
  add_amount(amounts[left], from == 'new' and 1 or -1, groups, samples, tokens, bytes)
  add_amount(amounts[to], 1, groups, samples, tokens, bytes)
end

-- Moves groups of an environment, of these sizes, from one state to another; from 'new' accepts them.
local function move_groups(from, to, environment, groups, samples, tokens, bytes)
  check_move('group', GROUP_TRANSITIONS, from, to)
  shift(ledger.groups, from, to, groups, samples, tokens, bytes)
  shift(amounts_of(environment), from, to, groups, samples, tokens, bytes)
  if from ~= 'new' and quotas_set() then
    topics.space = true
  end
  changed = true
end

-- Moves a task record to another state; from 'new' submits it.
local function move_task(task, to)
  check_move('task', TASK_TRANSITIONS, task.state, to)
  local counts = ledger.tasks
  if task.state == 'new' then
    counts.submitted = counts.submitted + 1
  else
    counts[task.state] = counts[task.state] - 1
  end
  counts[to] = counts[to] + 1
  task.state = to
  changed = true
end
