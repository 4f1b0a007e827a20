"""`rollout-buffer worker`."""
