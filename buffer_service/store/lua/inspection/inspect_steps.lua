-- One page of the steps that are forming, delivered, or trained and still stored, newest first. Writes nothing.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {limit, below (-1 for the first page)}
-- Replies {'steps', revision, now, steps, next (-1 after the last page)}; a step is {step, state, train_version,
--         target, micro, micro-batches, ranks, groups, samples, tokens, loss_tokens, bytes, staleness_sum,
--         staleness_max}
--       | {'error', 'unknown_run'}
-- Complexity O(limit * ranks)

-- @include batches

local ctx = Run.context()
local limit, below = unpack(unpack_msg(ARGV[1]), 1, 2)
if not Run.load(ctx) then
  return refuse('unknown_run')
end
local state = ctx.state
local newest = state.micro_batches > 0 and state.next_step or state.next_step - 1
local first = below >= 0 and math.min(newest, below - 1) or newest
local last = math.max(state.checkpointed_steps, first - limit + 1)
local steps = {}
for step = first, last, -1 do
  local header = Batches.load_step(step)
  local stored = Batches.load_micro_batch(step, header.micro_batches - 1)
  local total = stored.total
  steps[#steps + 1] = {
    step, Batches.step_state(ctx, step), header.train_version, header.target, header.micro, header.micro_batches,
    #stored.ranks, total.groups, total.samples, total.tokens, total.loss_tokens, total.bytes, total.staleness_sum,
    total.staleness_max,
  }
end
return reply('steps', state.revision, ctx.now, steps, last > state.checkpointed_steps and last or -1)
