-- Keeps a blob of the run, once. Field '' of the hash counts the bytes of all of them.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {seen_revision, sha256, bytes, most}: of all blobs together at most `most` bytes
-- Replies {'written', revision, bytes of all blobs}
--       | {'error', 'unknown_run' | 'store_rolled_back' | 'blobs_full', ...}
-- Complexity O(bytes)

-- @include run

local ctx = Run.context()
local seen, sha256, bytes, most = unpack(unpack_msg(ARGV[1]), 1, 4)
local refusal = Run.open(ctx, seen)
if refusal then
  return refusal
end
local BLOBS = key('blobs')
local kept = tonumber(call('HGET', BLOBS, '') or 0)
if call('HEXISTS', BLOBS, sha256) == 0 then
  kept = kept + #bytes
  if kept > most then
    return refuse('blobs_full', kept, most)
  end
  call('HSET', BLOBS, sha256, bytes, '', format('%d', kept))
  ctx.changed = true
end
return reply('written', Run.close(ctx), kept)
