-- Keys of the store under which a payload lies: its own, or that of each of its parts, as buffer_wire/payloads/keys.py
-- says too.

local Parts = {}

-- Size of a payload, and the number of its parts: 0 where it lies under its key alone. Of what is no key the size is
-- nil.
function Parts.of(payload)
  local size, count = string.match(payload, '^%l+:p:[^:]+:%x+:%x+:(%d+):?(%d*)$')
  return tonumber(size), tonumber(count) or 0
end

-- The keys, in order.
function Parts.keys(payload)
  local _, count = Parts.of(payload)
  if count == 0 then
    return {payload}
  end
  local keys = {}
  for index = 0, count - 1 do
    keys[#keys + 1] = payload .. '.' .. index
  end
  return keys
end

-- Calls COMMAND key ... for each of them.
function Parts.each(command, payload, ...)
  for _, part in ipairs(Parts.keys(payload)) do
    call(command, part, ...)
  end
end

-- Whether all of a payload of this size is there, and still expires: no group has it yet.
function Parts.are_unpushed(payload, size)
  for _, part in ipairs(Parts.keys(payload)) do
    local part_bytes = part == payload and size or math.min(size, PART_BYTES)
    if call('STRLEN', part) ~= part_bytes or call('PTTL', part) < 0 then
      return false
    end
    size = size - part_bytes
  end
  return true
end
