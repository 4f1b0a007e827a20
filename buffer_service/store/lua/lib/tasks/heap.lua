-- Binary heaps: arrays whose first entry comes first by `before(a, b)`.

local Heap = {}

-- Restores the order after the entry at `at` has moved back.
function Heap.sink(heap, at, before)
  local size, entry = #heap, heap[at]
  while true do
    local child = 2 * at
    if child > size then
      break
    end
    if child < size and before(heap[child + 1], heap[child]) then
      child = child + 1
    end
    if not before(heap[child], entry) then
      break
    end
    heap[at] = heap[child]
    at = child
  end
  heap[at] = entry
end

function Heap.make(heap, before)
  for at = math.floor(#heap / 2), 1, -1 do
    Heap.sink(heap, at, before)
  end
end

-- Puts a number in place of the first one of a heap of `size` numbers, which are compared without a call.
function Heap.replace_first(heap, size, entry)
  local at, child = 1, 2
  while child <= size do
    local least = heap[child]
    if child < size then
      local other = heap[child + 1]
      if other < least then
        child, least = child + 1, other
      end
    end
    if entry <= least then
      break
    end
    heap[at] = least
    at, child = child, 2 * child
  end
  heap[at] = entry
end

-- Takes the first entry out.
function Heap.pop(heap, before)
  local size = #heap
  heap[1] = heap[size]
  heap[size] = nil
  if size > 2 then
    Heap.sink(heap, 1, before)
  end
end
