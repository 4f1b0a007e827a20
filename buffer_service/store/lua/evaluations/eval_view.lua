-- How far evaluations are.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {eval_id ('' for all)}
-- Replies {'evaluations', revision, {evaluation, ...}} in order of submission: Evaluations.view,
--         with failures where one is named
--       | {'error', 'unknown_run' | 'unknown_evaluation', ...}
-- Complexity O(evaluations)

-- @include evaluations

local ctx = Run.context()
local eval_id = unpack_msg(ARGV[1])[1]
if not Run.load(ctx) then
  return refuse('unknown_run')
end
local state = ctx.state
if eval_id ~= '' then
  local evaluation = Evaluations.load(eval_id)
  if not evaluation then
    return refuse('unknown_evaluation', eval_id)
  end
  return reply('evaluations', Run.signed(ctx, state.revision), {Evaluations.view(eval_id, evaluation, true)})
end
local found = {}
local flat = call('HGETALL', key('evals'))
for at = 1, #flat, 2 do
  found[#found + 1] = {flat[at], unpack_msg(flat[at + 1])}
end
table.sort(found, function(one, two)
  return one[2].number < two[2].number
end)
for at, pair in ipairs(found) do
  found[at] = Evaluations.view(pair[1], pair[2], false)
end
return reply('evaluations', Run.signed(ctx, state.revision), found)
