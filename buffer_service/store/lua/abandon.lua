-- Gives up payloads that were blocked. One that was indexed after all (its reply got lost) stays.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {payload keys}
-- Replies {'ok', abandoned}
-- Complexity O(keys)

-- @include reply
-- @include staging

local staged = {}
for _, payload in ipairs(unpack_msg(ARGV[1])[1]) do
  if call('ZSCORE', key('staging'), payload) then
    staged[#staged + 1] = payload
  end
end
discard_staged(staged)
return reply('ok', #staged)
