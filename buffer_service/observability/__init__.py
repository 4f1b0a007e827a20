"""What the service says of itself: metrics, logs, and on whom a run waits."""
