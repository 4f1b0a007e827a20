-- Adds tasks and moves the feeder's cursor, both or neither.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, term, request_id, expected_cursor, cursor, feeder_state, tasks}; a task is
--         {task_id ('' asks for one), priority, spec, environment, expected_tokens (0: unknown), metadata (for the
--         recording)}
-- Replies {'submitted', revision, cursor, pending, task_ids}
--       | {'error', 'unknown_run' | 'store_rolled_back' | 'stale_term' | 'run_paused' | 'cursor_conflict' |
--         'pending_full', ...}
--       | {'error', 'task_exists', index, task_id} | {'error', 'environments', index, environment}
-- Complexity O(tasks * log pending)

-- @include tasks
-- @include environments

local ctx = Run.context()
local request = unpack_msg(ARGV[1])
local seen, term, request_id, expected_cursor, cursor, feeder_state, submitted = unpack(request, 1, 7)

local refusal = Run.open(ctx, seen) or Run.check_term(ctx, term)
if refusal then
  return refusal
end
local state, policy = ctx.state, ctx.policy
if state.paused ~= '' or state.draining then
  return refuse('run_paused', state.paused ~= '' and state.paused or 'draining')
end

local last = call('HGET', RUN, 'last_submit')
if last then
  local last_request, last_cursor, last_pending, last_ids = unpack(unpack_msg(last), 1, 4)
  if last_request == request_id then
    return reply('submitted', Run.close(ctx), last_cursor, last_pending, last_ids)
  end
end

if expected_cursor ~= state.cursor then
  return refuse('cursor_conflict', expected_cursor, state.cursor)
end
local pending = Pending.count(ctx)
if pending + #submitted > policy.max_pending_tasks then
  return refuse('pending_full', pending, policy.max_pending_tasks)
end

local task_ids, taken = {}, {}
for index, task in ipairs(submitted) do
  local task_id = unpack(task)
  if task_id == '' then
    task_id = format('t%08d', state.sequence + index)
  end
  if taken[task_id] or call('HEXISTS', key('tasks'), task_id) == 1 then
    return refuse('task_exists', index - 1, task_id)
  end
  taken[task_id] = true
  task_ids[index] = task_id
end

-- Nothing may be written before all are known to fit.
local new_environments = {}
for index, task in ipairs(submitted) do
  local _, _, _, environment = unpack(task, 1, 4)
  if not new_environments[environment] and not Environments.is_known(ctx, environment) then
    if not Environments.fits(ctx, environment) then
      return refuse('environments', index - 1, environment)
    end
    new_environments[environment] = true
    ctx.environments_left = ctx.environments_left - 1
  end
end

-- The tasks' places in the order of sequence, in which they are leased.
local places = {}
for index = 1, #submitted do
  places[index] = index
end
if policy.longest_first == 1 then
  table.sort(places, function(one, two)
    local a, b = submitted[one][5], submitted[two][5]
    return a > b or a == b and one < two
  end)
end
for _, index in ipairs(places) do
  state.sequence = state.sequence + 1
  local _, priority, spec, environment, _, metadata = unpack(submitted[index], 1, 6)
  local made = Tasks.new(state.sequence, priority, environment)
  Tasks.add(ctx, task_ids[index], made)
  call('HSET', key('specs'), task_ids[index], spec)
  if metadata ~= '' then
    Run.record(ctx, 'submitted', {ctx.now, task_ids[index], metadata})
  end
end
for environment in pairs(new_environments) do
  Environments.know(ctx, environment)
end
pending = pending + #submitted
state.cursor = cursor
ctx.changed = true
call('HSET', RUN, 'feeder', feeder_state, 'last_submit', pack({request_id, cursor, pending, task_ids}))
return reply('submitted', Run.close(ctx), cursor, pending, task_ids)
