"""Traces of a worker: its run, the attempts at groups, and the loads of weights."""
