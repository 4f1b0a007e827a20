"""State that one process holds for its clients: memory, streams, waits, and pushes that wait for room."""
