"""`rollout-buffer run`."""
