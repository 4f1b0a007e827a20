-- Replies: every script returns one msgpack array whose first element is its tag.
-- A refusal is {'error', reason, data...} with a reason of buffer_wire/errors.py.

local call = redis.call
local pack, unpack_msg = cmsgpack.pack, cmsgpack.unpack
local format, floor = string.format, math.floor

local function reply(...)
  return pack({...})
end

local function refuse(...)
  return pack({'error', ...})
end
