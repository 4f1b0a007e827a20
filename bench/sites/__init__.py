"""Two sites with a long way between them, and what the loop carries over it."""
