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
local keys = {}
for _, payload in ipairs(payloads) do
  for _, part in ipairs(Parts.keys(payload)) do
    keys[#keys + 1] = part
  end
end
for first = 1, #keys, 1000 do
  call('UNLINK', unpack(keys, first, math.min(first + 999, #keys)))
end
call_many('SREM', trash, payloads)
return reply('ok', #payloads, payloads)
