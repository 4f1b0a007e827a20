"""Calls of the rollout-buffer service, and the pushing of groups to it."""
