-- Notes whether a client that asked for access to the store relays its payloads, and why. Replies with what the service
-- makes the client's user of.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {client, why, most, forget_ms}: client is the direction, a blank and the client's id; why '' for one that
--         does not relay; of at most `most` clients that were heard within forget_ms the reasons are kept
-- Replies {'noted', former why, secret, host's ms} | {'error', 'unknown_run'}
-- Complexity O(most)

-- @include run

local ctx = Run.context()
local client, why, most, forget_ms = unpack(unpack_msg(ARGV[1]), 1, 4)
Run.relieve()
if not Run.load(ctx) then
  return refuse('unknown_run')
end
local RELAYING = key('relaying')
local former = call('HGET', RELAYING, client)
if why == '' then
  if former then
    call('HDEL', RELAYING, client)
  end
else
  local flat, oldest, kept = call('HGETALL', RELAYING), nil, 0
  for index = 1, #flat, 2 do
    local heard = unpack_msg(flat[index + 1])[1]
    if flat[index] ~= client then
      if heard < ctx.now - forget_ms then
        call('HDEL', RELAYING, flat[index])
      else
        kept = kept + 1
        if not oldest or heard < oldest[1] then
          oldest = {heard, flat[index]}
        end
      end
    end
  end
  if kept >= most then
    call('HDEL', RELAYING, oldest[2])
  end
  call('HSET', RELAYING, client, pack({ctx.now, why}))
end
local time = call('TIME')
return reply('noted', former and unpack_msg(former)[2] or '', ctx.secret or '', time[1] * 1000 + floor(time[2] / 1000))
