-- Replies: every script returns one msgpack array whose first element is its tag.
-- A refusal is {'error', reason, data...} with a reason of buffer_wire/errors.py.

-- By itself the collector rests until the heap has doubled, and then makes single calls twice or three times as long as
-- others. Begun anew by each script it does a little in all of them, for the same work in the sum.
collectgarbage('restart')

local call = redis.call
local pack, unpack_msg = cmsgpack.pack, cmsgpack.unpack
local format, floor = string.format, math.floor

local function reply(...)
  return pack({...})
end

local function refuse(...)
  return pack({'error', ...})
end
