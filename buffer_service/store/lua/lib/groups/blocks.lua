-- Where the records of queued groups are (Queue says why): hash `groups:<block>` has those of neighbouring
-- sequences, member → record. The block's name is what its members begin with.

-- @include reply
-- @include keys

local Blocks = {}

-- A block is of 10 ^ BLOCK_DIGITS sequences.
Blocks.BLOCK_DIGITS = 3

function Blocks.member_of(sequence)
  return format('%015d', sequence)
end

-- Name of a member's block.
function Blocks.name_of(member)
  return string.sub(member, 1, -1 - Blocks.BLOCK_DIGITS)
end

function Blocks.key_of(name)
  return key('groups:' .. name)
end

-- The blocks that members are in, {key, members, places of those among all} each. Neighbours often share one.
function Blocks.of(members)
  local blocks, by_name = {}, {}
  local name, there, places, count
  for place = 1, #members do
    local member = members[place]
    local its = Blocks.name_of(member)
    if its ~= name then
      local block = by_name[its]
      if not block then
        block = {key = Blocks.key_of(its), members = {}, places = {}}
        by_name[its], blocks[#blocks + 1] = block, block
      end
      name, there, places = its, block.members, block.places
      count = #places
    end
    count = count + 1
    there[count], places[count] = member, place
  end
  return blocks
end
