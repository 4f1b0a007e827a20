-- The scripts run inside Redis or Valkey: Lua 5.1 and what the server puts into the environment.
std = "lua51"
read_globals = { "redis", "cjson", "cmsgpack", "struct", "KEYS", "ARGV" }
max_line_length = 120
