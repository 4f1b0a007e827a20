-- Adds an evaluation, or finds it.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, term, eval_id, version (-1: the published one), digest, tasks}; a task is {task_id,
--         group_size, spec}
-- Replies {'submitted', revision, created (1 or 0), evaluation}: Evaluations.view
--       | {'error', 'unknown_run' | 'store_rolled_back' | 'stale_term' | 'run_paused' | 'evaluation_exists' |
--         'evaluations_full' | 'evaluation_version', ...}
-- Complexity O(tasks * log tasks)

-- @include tasks
-- @include commit

local ctx = Run.context()
local request = unpack_msg(ARGV[1])
local seen, term, eval_id, version, digest, tasks = unpack(request, 1, 6)

local refusal = Run.open(ctx, seen) or Run.check_term(ctx, term) or Commit.check_trainer(ctx)
if refusal then
  return refusal
end
local state = ctx.state
local known = Evaluations.load(eval_id)
if known then
  if known.digest ~= digest then
    return refuse('evaluation_exists', eval_id)
  end
  return reply('submitted', Run.close(ctx), 0, Evaluations.view(eval_id, known, true))
end
if call('HLEN', key('evals')) >= MAX_EVALUATIONS then
  return refuse('evaluations_full', 'evaluations', MAX_EVALUATIONS + 1, MAX_EVALUATIONS)
end
local bytes = 0
for _, task in ipairs(tasks) do
  local _, _, spec = unpack(task, 1, 3)
  bytes = bytes + #spec
end
local stored = Evaluations.stored_with(bytes)
if stored > MAX_EVAL_BYTES then
  return refuse('evaluations_full', 'stored_bytes', stored, MAX_EVAL_BYTES)
end
if version < 0 then
  version = state.version
end
local manifest = call('HGET', key('manifests'), format('%d', version))
if version > state.version or (version ~= state.version and version ~= 0 and not manifest) then
  return refuse('evaluation_version', version, state.version)
end

state.sequence = state.sequence + 1
local evaluation = {
  number = state.sequence, term = state.term, version = version, digest = digest, created_ms = ctx.now,
  tasks = #tasks, finished = 0, failed = 0, bytes = 0, failures = {},
}
for at, task in ipairs(tasks) do
  local task_id, group_size, spec = unpack(task, 1, 3)
  call('HSET', Evaluations.key_of('specs', evaluation.number), format('%d', at - 1), spec)
  local made = Tasks.new(evaluation.number, 0, '')
  made.evaluation, made.number, made.index, made.name = eval_id, evaluation.number, at - 1, task_id
  made.pinned, made.group_size, made.spec_bytes = {evaluation.term, version}, group_size, #spec
  Tasks.add(ctx, Evaluations.task_id_of(eval_id, evaluation.number, at - 1), made)
end
if manifest then
  call('HSET', key('eval_manifests'), format('%d', evaluation.number), manifest)
end
Evaluations.store_bytes(evaluation, bytes)
Evaluations.save(ctx, eval_id, evaluation)
return reply('submitted', Run.close(ctx), 1, Evaluations.view(eval_id, evaluation, true))
