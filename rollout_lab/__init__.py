"""Laboratory of staleness: a simulator that plays a loop through, a planner and comparisons of policies on it.

Everything in here is pure: numbers in, numbers out. Definitions and derivations: docs/staleness.md. Closed forms lie
with the service, which predicts live runs by them: `buffer_service.observability.estimate.closed_forms`.
"""
