"""`rollout-buffer top`."""
