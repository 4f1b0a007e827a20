"""`rollout-buffer status`."""
