"""Pure rules and types: no I/O, no protobuf, no Redis, no clock of its own."""
