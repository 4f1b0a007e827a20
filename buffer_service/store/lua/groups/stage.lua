-- Stages payloads that lie on servers of their own, before they are stored there or taken over from their pushers.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {payload keys to be stored, {payload key, task id} of each that its pusher has written}
-- Replies {'staged', marks}, a string with a digit for each that was written: 0 it has its group or waits for its
--         deletion, and is not staged; 1 it is staged now; 2 it was staged before
--       | {'error', 'unknown_run'}
-- Complexity O(keys)

-- @include reply
-- @include staging
-- @include tasks

local to_store, written = unpack(unpack_msg(ARGV[1]), 1, 2)
local layout = call('HGET', RUN, 'layout')
if not layout then
  return refuse('unknown_run')
end
Run.check_layout(layout)
local marks = {}
for index, each in ipairs(written) do
  local payload, task = each[1], Tasks.load(each[2])
  if task and Tasks.names(task, payload) or call('SISMEMBER', key('trash'), payload) == 1 then
    marks[index] = 0
  else
    marks[index] = Staging.stage(payload) and 1 or 2
  end
end
for _, payload in ipairs(to_store) do
  Staging.stage(payload)
end
return reply('staged', table.concat(marks))
