-- The scripts run inside Redis or Valkey: Lua 5.1 and what the server puts into the environment.
std = "lua51"
read_globals = { "redis", "cjson", "cmsgpack", "KEYS", "ARGV" }
-- A shared piece is included whole, so a script need not use all of it.
unused = true
max_line_length = 120
