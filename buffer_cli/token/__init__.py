"""`rollout-buffer token`."""
