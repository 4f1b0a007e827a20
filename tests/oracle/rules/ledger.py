"""The two ledgers: how many groups and tasks are in each state, moved only along the transition tables.

Invariant: accepted = the sum over group states, in groups, samples, tokens and bytes; submitted = the sum over task
states. A move that the tables do not allow raises IllegalTransition and changes nothing.
"""

from dataclasses import dataclass, field

from buffer_service.domain.ops import Amount
from buffer_service.rules.transitions import (
    GROUP_TRANSITIONS,
    NEW,
    TASK_TRANSITIONS,
    GroupState,
    TaskState,
)

ACCEPTED = "accepted"
SUBMITTED = "submitted"


class IllegalTransition(RuntimeError):
    """A rule tried a change of state that the transition table does not have: a defect of the rule."""

    def __init__(self, kind: str, identity: str, source: str, target: str) -> None:
        super().__init__(f"{kind} {identity} cannot go from {source} to {target}")


def add(left: Amount, right: Amount, sign: int = 1) -> Amount:
    """Sum of left and sign * right, field by field."""
    return Amount(
        groups=left.groups + sign * right.groups,
        samples=left.samples + sign * right.samples,
        tokens=left.tokens + sign * right.tokens,
        bytes=left.bytes + sign * right.bytes,
    )


@dataclass(slots=True)
class GroupLedger:
    """Amounts of groups by state."""

    accepted: Amount = field(default_factory=Amount)
    states: dict[str, Amount] = field(default_factory=lambda: {state.value: Amount() for state in GroupState})

    def move(self, group_id: str, amount: Amount, source: str, target: GroupState) -> None:
        """A group of that size changes state; `source` NEW accepts it."""
        if target not in GROUP_TRANSITIONS[source]:
            raise IllegalTransition("group", group_id, source, target)
        if source == NEW:
            self.accepted = add(self.accepted, amount)
        else:
            self.states[source] = add(self.states[source], amount, sign=-1)
        self.states[target] = add(self.states[target], amount)

    def entries(self) -> dict[str, Amount]:
        """`accepted` and every state."""
        return {ACCEPTED: self.accepted, **self.states}

    def balanced(self) -> bool:
        """Tell whether the states add up to what was accepted."""
        total = Amount()
        for amount in self.states.values():
            total = add(total, amount)
        return total == self.accepted


@dataclass(slots=True)
class TaskLedger:
    """Numbers of tasks by state."""

    submitted: int = 0
    states: dict[str, int] = field(default_factory=lambda: {state.value: 0 for state in TaskState})

    def move(self, task_id: str, source: str, target: TaskState) -> None:
        """A task changes state; `source` NEW submits it."""
        if target not in TASK_TRANSITIONS[source]:
            raise IllegalTransition("task", task_id, source, target)
        if source == NEW:
            self.submitted += 1
        else:
            self.states[source] -= 1
        self.states[target] += 1

    def entries(self) -> dict[str, int]:
        """`submitted` and every state."""
        return {SUBMITTED: self.submitted, **self.states}

    def balanced(self) -> bool:
        """Tell whether the states add up to what was submitted."""
        return sum(self.states.values()) == self.submitted
