"""`rollout-buffer bridge`."""
