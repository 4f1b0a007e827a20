-- Where the records of queued groups are: in blocks of neighbouring sequences (lib/queue.lua says why).

-- @include reply
-- @include keys

-- A block is of 10 ^ BLOCK_DIGITS sequences.
local BLOCK_DIGITS = 3

local function member_of(sequence)
  return format('%015d', sequence)
end

-- Key of a member's block.
local function block_of(member)
  return key('groups:' .. string.sub(member, 1, -1 - BLOCK_DIGITS))
end

-- {key of a block = {those of the members that are in it}}.
local function by_block(members)
  local blocks = {}
  for _, member in ipairs(members) do
    local block = block_of(member)
    local there = blocks[block]
    if not there then
      there = {}
      blocks[block] = there
    end
    there[#there + 1] = member
  end
  return blocks
end
