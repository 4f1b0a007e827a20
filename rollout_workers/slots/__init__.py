"""Slots: what the worker knows of each of its engines, and what state each is in."""
