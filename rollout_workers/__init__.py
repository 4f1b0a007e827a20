"""Rollout workers: lease tasks, drive engines, score samples, push groups, reload weights in flight.

Knows the service by the wire contract alone.
"""
