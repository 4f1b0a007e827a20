-- Goes on freeing what a commit or a checkpoint released.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {}
-- Replies {'ok', more} | {'error', 'unknown_run'}
-- Complexity O(256 groups)

-- @include free

local ctx = Run.context()
Run.relieve()
if not Run.load(ctx) then
  return refuse('unknown_run')
end
return reply('ok', Free.portion(ctx) and 1 or 0)
