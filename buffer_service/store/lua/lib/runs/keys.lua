-- Names of the run's index keys. They share KEYS[1]'s hash tag, so they are in its slot.

local RUN = KEYS[1]
local BASE = string.sub(RUN, 1, -4)

local function key(name)
  return BASE .. name
end

-- Calls COMMAND key item... in portions that fit Lua's stack.
local function call_many(command, at, items)
  local count = #items
  for first = 1, count, 1000 do
    redis.call(command, at, unpack(items, first, math.min(first + 999, count)))
  end
end
