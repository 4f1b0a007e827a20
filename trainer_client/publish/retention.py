"""Retention: selects the published versions that stay on disk.

A version is needed while a resume could go back to it. After a resume at step k, the service offers the newest version
published with at most k steps committed. k is never below the trainer's last checkpoint. So the newest version at or
below the checkpoint and all later ones are needed. A trainer that never checkpoints keeps them all.

Invariant: the newest `keep` versions and every needed one survive.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kept:
    """Published version that is on disk."""

    name: str
    """Name of the version's directory."""
    order: int
    """Order of the version's publish, rising with each."""
    committed_steps: int | None
    """Number of steps in the weights when they were published; None: of a timeline that a resume abandoned."""


def expendable(kept: Sequence[Kept], *, keep: int, checkpointed_steps: int) -> list[Kept]:
    """Select the versions that can be removed, oldest first."""
    by_age = sorted(kept, key=lambda entry: entry.order)
    covered = [e for e in by_age if e.committed_steps is not None and e.committed_steps <= checkpointed_steps]
    fallback = max(covered, key=lambda entry: (entry.committed_steps or 0, entry.order), default=None)
    newest = by_age[-keep:]
    return [
        entry
        for entry in by_age
        if entry not in newest
        and entry != fallback
        and (entry.committed_steps is None or entry.committed_steps <= checkpointed_steps)
    ]
