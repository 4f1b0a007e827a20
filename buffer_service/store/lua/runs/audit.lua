-- Puts payloads on trash that nothing names: what a server has brought back, or what an index has forgotten that lost
-- its last writes. A payload that was there before this call is staged, on trash, or named by its task.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {{payload key, task id, is_cut}, ...}: payloads that do not expire, and the tasks that their headers name
--         ('': none); is_cut: 1 where the first part is gone, so that nobody can read it
-- Replies {'audited', found} | {'error', 'unknown_run'}
-- Complexity O(payloads)

-- @include run
-- @include tasks

Run.relieve()
local layout = call('HGET', RUN, 'layout')
if not layout then
  return refuse('unknown_run')
end
Run.check_layout(layout)
local found = 0
for _, each in ipairs(unpack_msg(ARGV[1])[1]) do
  local payload, task_id, is_cut = each[1], each[2], each[3] == 1
  if (task_id ~= '' or is_cut) and not call('ZSCORE', key('staging'), payload) then
    local task = not is_cut and Tasks.load(task_id)
    if not task or not Tasks.names(task, payload) then
      found = found + call('SADD', key('trash'), payload)
    end
  end
end
return reply('audited', found)
