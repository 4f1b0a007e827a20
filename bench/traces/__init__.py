"""Traces of a whole loop: received, shown as a tree, and what they cost."""
