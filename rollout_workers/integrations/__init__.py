"""Environments of other libraries as rollout functions; each module needs the extra of its name."""
