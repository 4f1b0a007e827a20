"""Names that are made of other names: group ids and lease ids.

Task ids hold no slash, so both can be taken apart again; numbers are written without leading zeros, so that every
lease and every group has exactly one name.
"""

import re
from dataclasses import dataclass

_LEASE_ID = re.compile(r"(?P<task_id>[^/]+)/(?P<incarnation>0|[1-9][0-9]{0,14})/(?P<attempt>[1-9][0-9]{0,14})")


@dataclass(frozen=True, slots=True)
class LeaseId:
    """Parts of a lease id: one attempt of one incarnation of a task."""

    task_id: str
    incarnation: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.task_id}/{self.incarnation}/{self.attempt}"

    @classmethod
    def parse(cls, lease_id: str) -> "LeaseId | None":
        """The parts of a lease id, None when it is malformed."""
        match = _LEASE_ID.fullmatch(lease_id)
        if match is None:
            return None
        return cls(match["task_id"], int(match["incarnation"]), int(match["attempt"]))


_EVALUATION_TASK_ID = re.compile(r"(?P<eval_id>[^@]+)@(?P<number>0|[1-9][0-9]{0,14})\.(?P<index>0|[1-9][0-9]{0,3})")


@dataclass(frozen=True, slots=True)
class EvaluationTaskId:
    """Name of a task of an evaluation: the evaluation, its number, which no later one has, and the task's place."""

    eval_id: str
    number: int
    index: int

    def __str__(self) -> str:
        return f"{self.eval_id}@{self.number}.{self.index}"

    @classmethod
    def parse(cls, task_id: str) -> "EvaluationTaskId | None":
        """The parts of such an id, None for every other one."""
        match = _EVALUATION_TASK_ID.fullmatch(task_id)
        if match is None:
            return None
        return cls(match["eval_id"], int(match["number"]), int(match["index"]))


def group_id(task_id: str, incarnation: int) -> str:
    """Id of the group that an incarnation of a task becomes."""
    return f"{task_id}/{incarnation}"
