-- Deletes an evaluation, in portions. From the first one on nobody finds it, and leases of it are lost.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, eval_id ('': goes on with what was deleted before)}
-- Replies {'deleted', revision, more (1: call again with '')}
--       | {'error', 'unknown_run' | 'store_rolled_back' | 'unknown_evaluation', ...}
-- Complexity O(256 tasks)

-- @include evaluations
-- @include burial

local ctx = Run.context()
local seen, eval_id = unpack(unpack_msg(ARGV[1]), 1, 2)
local PORTION = 256

Run.relieve()
local refusal = Run.open(ctx, seen)
if refusal then
  return refusal
end
if eval_id ~= '' then
  local evaluation = Evaluations.load(eval_id)
  if not evaluation then
    return refuse('unknown_evaluation', eval_id)
  end
  call('HDEL', key('evals'), eval_id)
  call('ZREM', key('eval_open'), eval_id)
  call('SADD', key('eval_deleting'), format('%d', evaluation.number))
  Evaluations.store_bytes(evaluation, -evaluation.bytes)
  ctx.changed = true
  ctx.topics.results = true
end
local done = Burial.bury(PORTION)
return reply('deleted', Run.close(ctx), done >= PORTION and 1 or 0)
