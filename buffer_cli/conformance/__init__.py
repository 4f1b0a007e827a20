"""`rollout-buffer conformance`."""
