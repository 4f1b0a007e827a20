-- Reads a blob of the run.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {sha256}
-- Replies {'blob', bytes} | {'error', 'unknown_run' | 'unknown_blob', ...}
-- Complexity O(bytes)

-- @include run

local ctx = Run.context()
local sha256 = unpack_msg(ARGV[1])[1]
if not Run.load(ctx) then
  return refuse('unknown_run')
end
local bytes = call('HGET', key('blobs'), sha256)
if not bytes then
  return refuse('unknown_blob', sha256)
end
return reply('blob', bytes)
