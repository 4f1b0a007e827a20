-- Payloads between their writing and their indexing. `staging` (score: ms of the last touch by a script, 0 before the
-- first) holds keys that nothing refers to yet, so that a replica that dies in between leaves no orphan: the sweep
-- deletes what stays too long. It is deleted at once, not put on trash: what a pusher wrote may come again under the
-- same key before the trash is emptied.

-- @include keys

local Staging = {}

-- Whether a payload was written by its pusher, is this long, and no group has it yet, or it is staged.
function Staging.has(payload, is_stored, size)
  return is_stored == 1 and call('STRLEN', payload) == size and call('PTTL', payload) >= 0
    or call('ZSCORE', key('staging'), payload)
end

-- A payload that its pusher wrote goes the way of its group, as the push has decided. What is missing is left alone: it
-- may be another's.
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
      call('UNLINK', payload)
    end
  end
  call_many('ZREM', key('waiting'), payloads)
end
