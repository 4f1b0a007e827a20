-- Replaces the policy of a run; a higher failure budget releases it.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, policy}
-- Replies {'ok', revision} | {'error', 'unknown_run' | 'store_rolled_back', ...}
-- Complexity O(1)

-- @include ledger

local request = unpack_msg(ARGV[1])
relieve()
local refusal = open_run(request[1])
if refusal then
  return refusal
end
for name, value in pairs(request[2]) do
  if policy[name] ~= value then
    policy[name] = value
    changed = true
  end
end
if changed then
  call('HSET', RUN, 'policy', pack(policy))
  topics.groups, topics.tasks, topics.space = true, true, true
  recheck_budget()
end
return reply('ok', close_run())
