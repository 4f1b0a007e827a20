-- Gives groups of a step back, which is open, or complete and not committed: they end as rejected, and the step takes
-- as many others. What the step uses again just leaves it, and is not drawn any more. Those that were rejected from it
-- before stay so.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, term, step, group ids, reason}
-- Replies {'rejected', revision, rejected, missing, step, micro-batch (the last one), final, train_version, groups,
--         samples, tokens, loss_tokens, trajectories, reused, staleness_sum, staleness_max}; rejected: by this call;
--         missing: groups that the step is still to get; sizes and staleness are those of the step as it is now
--       | {'error', 'unknown_run' | 'store_rolled_back' | 'stale_term' | 'run_paused' | 'step_ahead' |
--         'step_committed' | 'not_of_step', ...}
-- Complexity O(groups of the step)

-- @include commit

local ctx = Run.context()
local seen, term, step, ids, reason = unpack(unpack_msg(ARGV[1]), 1, 5)

Run.relieve()
local refusal = Run.open(ctx, seen) or Run.check_term(ctx, term) or Commit.check_trainer(ctx)
if refusal then
  return refusal
end
local state = ctx.state
local is_open = step == state.next_step and state.micro_batches > 0
if step >= state.next_step and not is_open then
  return refuse('step_ahead', step, state.next_step)
elseif step < state.committed_steps then
  return refuse('step_committed', step, state.committed_steps)
end
local header = Batches.load_step(step)
local field = format('%d', step)
local raw = #ids > 0 and call('HGET', key('rejected'), field)
local before = raw and unpack_msg(raw) or {}
local gone, wanted = {}, {}
for _, id in ipairs(before) do
  gone[id] = true
end
local there = {}
if #ids > 0 then
  for micro_batch = Batches.first(header), header.micro_batches - 1 do
    local stored = Batches.load_micro_batch(step, micro_batch)
    for _, group in ipairs(Batches.micro_batch_groups(step, micro_batch, stored)) do
      there[group[G_ID]] = true
    end
  end
end
for index, id in ipairs(ids) do
  if there[id] then
    wanted[id] = true
  elseif not gone[id] then
    return refuse('not_of_step', index - 1, id, step)
  end
end

local rejected, from = 0, Batches.step_state(ctx, step)
if next(wanted) then
  header.given_back = header.given_back or is_open or nil
  local own
  rejected, own = Batches.take_out(ctx, step, header, 'given_back', function(group)
    return wanted[group[G_ID]]
  end, function(group)
    Groups.finish(ctx, group, from, 'rejected', reason)
  end)
  for id in pairs(wanted) do
    before[#before + 1] = id
  end
  call('HSET', key('rejected'), field, pack(before))
  if not is_open then
    Batches.miss(ctx, header, own)
    Batches.save_step(step, header)
  end
  ctx.topics.tasks = true
  Run.refuse_first_release()
end
local missing = is_open and header.target - header.groups or header.missing or 0
local last = header.micro_batches - 1
local total = Batches.load_micro_batch(step, last).total
return reply('rejected', Run.close(ctx), rejected, missing, step, last, (is_open or missing > 0) and 0 or 1,
  header.train_version, total.groups, total.samples, total.tokens, total.loss_tokens, Batches.trajectories(total),
  header.reused or 0, total.staleness_sum, total.staleness_max)
