"""Runnable examples of the loop."""
