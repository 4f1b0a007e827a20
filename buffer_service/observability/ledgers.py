"""The two conservation laws of a run: nothing that was accepted or submitted disappears."""

from buffer_service.domain.ops import Amount, RunView
from buffer_service.domain.transitions import GroupState, TaskState


def groups_balanced(view: RunView) -> bool:
    """True when accepted groups equal the sum of their dispositions, in every unit."""
    parts = [view.groups.get(state, Amount()) for state in GroupState]
    accepted = view.groups.get("accepted", Amount())
    return all(
        getattr(accepted, unit) == sum(getattr(part, unit) for part in parts)
        for unit in ("groups", "samples", "tokens", "bytes")
    )


def tasks_balanced(view: RunView) -> bool:
    """True when submitted tasks equal the sum of their states."""
    return view.tasks.get("submitted", 0) == sum(view.tasks.get(state, 0) for state in TaskState)
