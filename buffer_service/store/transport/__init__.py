"""The transport: how scripts and payloads get to the store and back; it knows nothing of the rules."""
