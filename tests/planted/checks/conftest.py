"""Checks of planted changes run in a copy of the tree that has the change, by scripts/planted_changes.py alone."""

from tests.store.conftest import cluster, run, server, store

__all__ = ["cluster", "run", "server", "store"]
