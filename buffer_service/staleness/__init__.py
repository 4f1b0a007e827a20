"""Staleness: closed forms that predict it, a simulator that plays it through, a planner that compares choices.

Everything in here is pure: numbers in, numbers out. Definitions and derivations: docs/staleness.md.
"""
