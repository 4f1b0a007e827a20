-- Payloads between their writing and their indexing. `staging` (score: ms of the last touch by a script, 0 before the
-- first) holds keys that nothing refers to yet, so that a replica that dies in between leaves no orphan: the sweep
-- deletes what stays too long. It is deleted at once, not put on trash: what a pusher wrote may come again under the
-- same key before the trash is emptied.
--
-- Where payloads lie apart, on servers of their own, no script touches them. They are staged before they are stored or
-- taken over, and what is not needed goes to trash; the service deletes it, with the answer where it can.

-- @include keys
-- @include parts

local Staging = {}

-- Outcomes of a push with which something refers to the payload.
Staging.KEPT = {queued = true, recorded = true, added = true}

function Staging.delete(payload)
  if PAYLOADS_APART == 1 then
    call('SADD', key('trash'), payload)
  else
    Parts.each('UNLINK', payload)
  end
end

-- Stages a payload; false where it was staged before.
function Staging.stage(payload)
  return call('ZADD', key('staging'), 'NX', 0, payload) == 1
end

-- Whether a group's payload was written by its pusher, is as long as it says, and no group has it yet, or it is staged.
-- Apart: whether the service has found it there, and it is staged.
function Staging.has(group)
  local payload = group[P_PAYLOAD]
  if PAYLOADS_APART == 1 then
    return group.is_there and call('ZSCORE', key('staging'), payload)
  end
  return group[P_STORED] == 1 and Parts.are_unpushed(payload, group[P_SIZE_BYTES])
    or call('ZSCORE', key('staging'), payload)
end

-- A payload that its pusher wrote goes the way of its group, as the push has decided. What is missing is left alone: it
-- may be another's.
function Staging.settle(ctx, group, outcome)
  local payload = group[P_PAYLOAD]
  if Staging.KEPT[outcome] or outcome == 'blocked' then
    if PAYLOADS_APART == 0 then
      Parts.each('PERSIST', payload)
    end
  elseif outcome == 'rejected_full' then
    if PAYLOADS_APART == 0 then
      Parts.each('PEXPIRE', payload, UNPUSHED_MS)
    else
      -- It does not expire any more: its next try finds it staged, or the sweep does.
      call('ZADD', key('staging'), format('%d', ctx.now), payload)
    end
  elseif outcome == 'payload_missing' then
    -- There, and staged no more: a push at the same time has found it missing.
    if group.is_there then
      Staging.delete(payload)
    end
  elseif outcome ~= 'more' then
    Staging.delete(payload)
  elseif PAYLOADS_APART == 1 and not group.is_there then
    -- The call that comes again for it finds out by the staging.
    call('ZREM', key('staging'), payload)
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
      Staging.delete(payload)
    end
  end
  call_many('ZREM', key('waiting'), payloads)
end
