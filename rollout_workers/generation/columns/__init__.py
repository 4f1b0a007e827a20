"""Columns of a group beside its tokens: what a task asks of the engine, and what the user's functions give."""
