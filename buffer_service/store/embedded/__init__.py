"""The embedded store: a server of its own, its binary and its data directory."""
