"""`rollout-buffer inspect`."""
