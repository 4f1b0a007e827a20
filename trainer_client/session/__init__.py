"""Session of a trainer with a run: feeds tasks, iterates over batches, publishes weights, and measures each step."""
