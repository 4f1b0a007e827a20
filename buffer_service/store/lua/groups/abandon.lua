-- Gives up payloads that were blocked, and their places in the line. One that was indexed after all (its reply got
-- lost) stays.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {payload keys}
-- Replies {'ok'}
-- Complexity O(keys)

-- @include reply
-- @include staging

Staging.discard(unpack_msg(ARGV[1])[1])
if call('EXISTS', key('waiting')) == 1 then
  call('PUBLISH', key('notify'), 'space')
end
return reply('ok')
