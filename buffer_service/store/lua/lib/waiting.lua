-- The line of pushes that wait for room, first come first served over all replicas.
--
-- Sorted set `waiting` (score: ticket, member: payload key). A ticket is the time when it was given (ms), or one more
-- than the last. Who has not come again TICKET_MS after the last answer (the payload's score in `staging`) is taken out
-- when it is at the head, and gets a new ticket if it comes after all.

-- @include run

local TICKET_MS = 3000

local WAITING = key('waiting')
-- Payload at the head: nil when not known, false when nobody waits.
local line_head
-- Whether somebody has left the line, so that others may be next.
local line_moved = false

local function head_of_line()
  while line_head == nil do
    local first = call('ZRANGE', WAITING, 0, 0)[1]
    local touched = first and tonumber(call('ZSCORE', key('staging'), first) or 0)
    if not first or now - touched <= TICKET_MS then
      line_head = first or false
    else
      call('ZREM', WAITING, first)
      line_moved = true
    end
  end
  return line_head
end

-- Whether somebody else's turn is before this payload's.
local function is_behind_others(payload)
  local head = head_of_line()
  return head and head ~= payload
end

-- Joins the line or stays in it; its time is the caller's to stage. The head must be known.
local function wait_in_line(payload)
  local ticket = math.max(state.tickets + 1, now)
  if call('ZADD', WAITING, 'NX', format('%d', ticket), payload) == 1 then
    state.tickets = ticket
    changed = true
    line_head = line_head or payload
  end
end

local function leave_line(payload)
  if call('ZREM', WAITING, payload) == 1 then
    line_head, line_moved = nil, true
  end
end

-- Whether this script took anybody out of the line.
local function somebody_left()
  return line_moved
end

local function somebody_waits()
  return call('EXISTS', WAITING) == 1
end
