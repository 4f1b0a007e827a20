-- Deletes an evaluation, in portions. From the first one on nobody finds it; leases of it lapse.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, eval_id ('': goes on with what was deleted before)}
-- Replies {'deleted', revision, more (1: call again with '')}
--       | {'error', 'unknown_run' | 'store_rolled_back' | 'unknown_evaluation', ...}
-- Complexity O(256 tasks)

-- @include evaluations
-- @include burial

local seen, eval_id = unpack(unpack_msg(ARGV[1]), 1, 2)
local PORTION = 256

relieve()
local refusal = open_run(seen)
if refusal then
  return refusal
end
if eval_id ~= '' then
  local evaluation = load_evaluation(eval_id)
  if not evaluation then
    return refuse('unknown_evaluation', eval_id)
  end
  call('HDEL', EVALS, eval_id)
  call('ZREM', EVAL_OPEN, eval_id)
  call('SADD', EVAL_DELETING, format('%d', evaluation.number))
  store_bytes(evaluation, -evaluation.bytes)
  changed = true
  topics.results = true
end
local done = bury_evaluations(PORTION)
return reply('deleted', close_run(), done >= PORTION and 1 or 0)
