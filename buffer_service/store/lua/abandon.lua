-- Gives up payloads that were blocked. One that was indexed after all (its reply got lost) stays.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {payload keys}
-- Replies {'ok'}
-- Complexity O(keys)

-- @include reply
-- @include staging

discard_staged(unpack_msg(ARGV[1])[1])
return reply('ok')
