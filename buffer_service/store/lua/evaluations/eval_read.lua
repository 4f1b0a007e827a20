-- Tasks of an evaluation that have ended, in order of their ending.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {eval_id, start, limit}
-- Replies {'results', revision, evaluation, results}: Evaluations.view, and for each result
--         {index, task_id, attempts, error, payload key ('' where it failed)}
--       | {'error', 'unknown_run' | 'unknown_evaluation', ...}
-- Complexity O(limit)

-- @include evaluations

local ctx = Run.context()
local eval_id, start, limit = unpack(unpack_msg(ARGV[1]), 1, 3)
if not Run.load(ctx) then
  return refuse('unknown_run')
end
local evaluation = Evaluations.load(eval_id)
if not evaluation then
  return refuse('unknown_evaluation', eval_id)
end
local results = {}
local last = format('%d', start + limit - 1)
for at, index in ipairs(call('LRANGE', Evaluations.key_of('ended', evaluation.number), format('%d', start), last)) do
  local task = Evaluations.task_at(evaluation, tonumber(index))
  results[at] = {tonumber(index), task.name, task.attempt, task.body == '' and task.error or '', task.body}
end
return reply('results', Run.signed(ctx, ctx.state.revision), Evaluations.view(eval_id, evaluation, true), results)
