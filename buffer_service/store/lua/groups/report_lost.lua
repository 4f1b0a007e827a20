-- Settles groups of a step that is delivered or still forming, whose payloads are gone, as lost, and starts their tasks
-- anew. Steps and group ids come again, after a resume and in a run of the same name: whoever reads on with what an
-- earlier trainer was given must not touch the present one's. Payload keys never come again.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {term, step, payload keys}: term of the pull that found them gone
-- Replies {'ok', revision, lost} | {'error', 'unknown_run' | 'stale_term', ...}
-- Complexity O(groups of the step)

-- @include batches

local ctx = Run.context()
local request = unpack_msg(ARGV[1])
local term, step, reported = unpack(request, 1, 3)

Run.relieve()
if not Run.begin(ctx) then
  return refuse('unknown_run')
end
local state = ctx.state
local refusal = Run.check_term(ctx, term)
if refusal then
  return refusal
end
local is_delivered = step >= state.committed_steps and step < state.next_step
local is_open = step == state.next_step and state.micro_batches > 0
local header = not state.resuming and (is_delivered or is_open) and Batches.load_step(step)
local gone, lost = {}, 0
for _, payload in ipairs(reported) do
  gone[payload] = true
end
if header then
  header.given_back = header.given_back or is_open or nil
  lost = Batches.take_out(ctx, step, header, 'lost', function(group)
    for _, payload in ipairs(Record.payloads(group)) do
      if gone[payload] then
        return true
      end
    end
    return false
  end, function(group)
    Groups.replace(ctx, group, Batches.step_state(ctx, step), 'lost', 'lost')
  end)
end
return reply('ok', Run.close(ctx), lost)
