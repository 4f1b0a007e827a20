"""Metrics, probes and a JSON index over HTTP."""
