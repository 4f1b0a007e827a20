"""Observability of the service: metrics, logs, and on whom a run waits."""
