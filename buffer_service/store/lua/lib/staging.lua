-- Payloads between their writing and their indexing. `staging` (score: ms of the last touch) holds keys that nothing
-- refers to yet, so that a replica that dies in between leaves no orphan: the sweep trashes what stays too long.

-- @include keys

local function unstage(payloads)
  call_many('ZREM', key('staging'), payloads)
end

-- The payloads are no use to anybody.
local function discard_staged(payloads)
  unstage(payloads)
  call_many('SADD', key('trash'), payloads)
end
