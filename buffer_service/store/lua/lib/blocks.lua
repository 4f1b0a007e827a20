-- Where the records of queued groups are (lib/queue.lua says why): hash `groups:<block>` has those of neighbouring
-- sequences, member → record. The block's name is what its members begin with.

-- @include reply
-- @include keys

-- A block is of 10 ^ BLOCK_DIGITS sequences.
local BLOCK_DIGITS = 3

local function member_of(sequence)
  return format('%015d', sequence)
end

-- Name of a member's block.
local function block_of(member)
  return string.sub(member, 1, -1 - BLOCK_DIGITS)
end

local function block_key(name)
  return key('groups:' .. name)
end

-- Calls visit(key of a block, those of the members that are in it, their places among the members) for each block.
local function for_each_block(members, visit)
  local blocks = {}
  for place, member in ipairs(members) do
    local name = block_of(member)
    local block = blocks[name]
    if not block then
      block = {members = {}, places = {}}
      blocks[name] = block
    end
    local count = #block.places + 1
    block.members[count], block.places[count] = member, place
  end
  for name, block in pairs(blocks) do
    visit(block_key(name), block.members, block.places)
  end
end
