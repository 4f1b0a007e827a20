-- Goes on freeing what a commit or a checkpoint released.
--
-- KEYS[1] rb:{R}:run
-- ARGV[1] {}
-- Replies {'ok', more} | {'error', 'unknown_run'}
-- Complexity O(256 groups)

-- @include free

relieve()
if not load_run() then
  return refuse('unknown_run')
end
return reply('ok', free_some() and 1 or 0)
