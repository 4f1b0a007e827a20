-- Payloads between their writing and their indexing. `staging` (score: ms of the last touch by a script, 0 before the
-- first) holds keys that nothing refers to yet, so that a replica that dies in between leaves no orphan: the sweep
-- trashes what stays too long.

-- @include keys

local Staging = {}

-- Whether a payload is staged, or was written by its pusher, is this long, and no group has it yet.
function Staging.has(payload, is_stored, size)
  return call('ZSCORE', key('staging'), payload)
    or is_stored == 1 and call('STRLEN', payload) == size and call('PTTL', payload) >= 0
end

-- A payload that its pusher wrote goes the way of its group, as the push has decided. What is missing is left alone: it
-- may be another's. None is put on trash, for the same key may be written and pushed again before the trash is emptied.
function Staging.settle(payload, outcome)
  if outcome == 'queued' or outcome == 'recorded' or outcome == 'blocked' then
    call('PERSIST', payload)
  elseif outcome == 'rejected_full' then
    call('PEXPIRE', payload, UNPUSHED_MS)
  elseif outcome ~= 'payload_missing' and outcome ~= 'more' then
    call('UNLINK', payload)
  end
end

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
