"""Tables of the rules: what Lua, Python and the wire share is written here once, as data."""
