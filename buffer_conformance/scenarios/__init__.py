"""Scenarios of the suites: what the kit does to a candidate."""
