"""Integrations: the buffer as rollout source of other trainers; each module needs the extra of its name."""
