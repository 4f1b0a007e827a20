-- Deletes payloads that nothing refers to any more, where they lie with the index.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {how many at most}
-- Replies {'ok', how many, payload keys}: those that were on trash
-- Complexity O(keys)

-- @include reply
-- @include keys
-- @include parts

local trash = key('trash')
local payloads = call('SRANDMEMBER', trash, unpack_msg(ARGV[1])[1])
for _, payload in ipairs(payloads) do
  Parts.each('UNLINK', payload)
end
call_many('SREM', trash, payloads)
return reply('ok', #payloads, payloads)
