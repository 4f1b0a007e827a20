-- The line of pushes that wait for room, first come first served over all replicas.
--
-- Sorted set `waiting` (score: ticket, member: payload key). A ticket is the time when it was given (ms), or one more
-- than the last. Who has not come again TICKET_MS after the last answer (the payload's score in `staging`) is taken out
-- when it is at the head, and gets a new ticket if it comes after all.
--
-- ctx.line_head: payload at the head, nil when not known, false when nobody waits; line_moved: true when this call took
-- somebody out of the line, so that others may be next.

-- @include run

local Waiting = {}

Waiting.TICKET_MS = 3000

function Waiting.head(ctx)
  while ctx.line_head == nil do
    local first = call('ZRANGE', key('waiting'), 0, 0)[1]
    local touched = first and tonumber(call('ZSCORE', key('staging'), first) or 0)
    if not first or ctx.now - touched <= Waiting.TICKET_MS then
      ctx.line_head = first or false
    else
      call('ZREM', key('waiting'), first)
      ctx.line_moved = true
    end
  end
  return ctx.line_head
end

-- Whether somebody else's turn is before this payload's.
function Waiting.is_behind_others(ctx, payload)
  local head = Waiting.head(ctx)
  return head and head ~= payload
end

-- Joins the line or stays in it; its time is the caller's to stage. The head must be known. Returns whether it joined.
function Waiting.join(ctx, payload)
  local state = ctx.state
  local ticket = math.max(state.tickets + 1, ctx.now)
  if call('ZADD', key('waiting'), 'NX', format('%d', ticket), payload) == 1 then
    state.tickets = ticket
    ctx.changed = true
    ctx.line_head = ctx.line_head or payload
    return true
  end
  return false
end

function Waiting.has(payload)
  return call('ZSCORE', key('waiting'), payload)
end

function Waiting.leave(ctx, payload)
  if call('ZREM', key('waiting'), payload) == 1 then
    ctx.line_head, ctx.line_moved = nil, true
  end
end

-- Whether this script took anybody out of the line.
function Waiting.somebody_left(ctx)
  return ctx.line_moved
end

function Waiting.somebody_waits()
  return call('EXISTS', key('waiting')) == 1
end
