"""Evaluations in both clients: their calls as values, and the reading of their results."""
