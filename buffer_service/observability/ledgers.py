"""The two conservation laws of a run: nothing that was accepted or submitted disappears."""

from collections.abc import Mapping

from buffer_service.domain.ops import Amount, RunView
from buffer_service.rules.transitions import GroupState, TaskState

UNITS = ("groups", "samples", "tokens", "bytes")


def balanced(ledger: Mapping[str, Amount]) -> bool:
    """True when accepted groups equal the sum of their dispositions, in every unit."""
    parts = [ledger.get(state, Amount()) for state in GroupState]
    accepted = ledger.get("accepted", Amount())
    return all(getattr(accepted, unit) == sum(getattr(part, unit) for part in parts) for unit in UNITS)


def groups_balanced(view: RunView) -> bool:
    """True when the run's group ledger and that of each environment balance."""
    return balanced(view.groups) and all(balanced(ledger) for ledger in view.environments.values())


def tasks_balanced(view: RunView) -> bool:
    """True when submitted tasks equal the sum of their states."""
    return view.tasks.get("submitted", 0) == sum(view.tasks.get(state, 0) for state in TaskState)
