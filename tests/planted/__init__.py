"""Planted changes: what the table of docs/architecture.md calls a change, made small and real, as edits of the tree."""
