"""Laboratory of staleness: a planner, and comparisons of policies on the simulator.

Everything in here is pure: numbers in, numbers out. Definitions and derivations: docs/staleness.md. Closed forms and
simulator lie with the service, which predicts live runs by them.
"""
