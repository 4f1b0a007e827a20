-- Records what a worker says of an engine.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, engine_id, report}; report: packed {engine_id, worker_id, state, epoch, version, reloads,
--         last_reload_ms, last_error, errors}
-- Replies {'ok', revision, epoch, version} | {'error', 'unknown_run' | 'store_rolled_back', ...}
-- Complexity O(1)

-- @include run

local request = unpack_msg(ARGV[1])
relieve()
local refusal = open_run(request[1])
if refusal then
  return refusal
end
if call('HGET', key('engines'), request[2]) ~= request[3] then
  call('HSET', key('engines'), request[2], request[3])
  changed = true
  topics.tasks = true
end
return reply('ok', close_run(), state.epoch, state.version)
