"""Weights on their way: who is let in, and what is changed in an older file."""
