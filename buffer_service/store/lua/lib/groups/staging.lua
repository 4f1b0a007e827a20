-- Payloads between their writing and their indexing. `staging` (score: ms of the last touch by a script, 0 before the
-- first) holds keys that nothing refers to yet, so that a replica that dies in between leaves no orphan: the sweep
-- trashes what stays too long.

-- @include keys

local Staging = {}

function Staging.unstage(payloads)
  call_many('ZREM', key('staging'), payloads)
end

-- The payloads are no use to anybody, and wait for room no more. One that is not staged (any more) was indexed, and is
-- left alone.
function Staging.discard(payloads)
  local staging = key('staging')
  for _, payload in ipairs(payloads) do
    if call('ZREM', staging, payload) == 1 then
      call('SADD', key('trash'), payload)
    end
  end
  call_many('ZREM', key('waiting'), payloads)
end
