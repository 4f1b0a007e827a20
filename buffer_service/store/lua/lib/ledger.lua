-- Both ledgers. Every change of state of a group or a task goes through `move_group` or `move_task`, which refuse what
-- the transition tables (rendered from domain/transitions.py) do not have.
--
-- ledger.groups: {accepted and every state = {groups, samples, tokens, bytes}}; ledger.tasks: {submitted and every
-- state =
-- count}; ledger.statistics: the fields of the wire's RunStatistics.

-- @include run
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

-- Moves groups of these sizes from one state to another; from 'new' accepts them.
local function move_groups(from, to, groups, samples, tokens, bytes)
  check_move('group', GROUP_TRANSITIONS, from, to)
  local amounts = ledger.groups
  if from == 'new' then
    add_amount(amounts.accepted, 1, groups, samples, tokens, bytes)
  else
    add_amount(amounts[from], -1, groups, samples, tokens, bytes)
  end
  add_amount(amounts[to], 1, groups, samples, tokens, bytes)
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
