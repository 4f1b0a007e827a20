"""`rollout-buffer relay`."""
