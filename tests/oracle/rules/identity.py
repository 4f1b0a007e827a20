"""Names that are made of other names: group ids and lease ids.

Task ids hold no slash, so both can be taken apart again; numbers are written without leading zeros, so that every
lease and every group has exactly one name.
"""

import re
from dataclasses import dataclass

_LEASE_ID = re.compile(r"(?P<task_id>[^/]+)/(?P<generation>0|[1-9][0-9]{0,14})/(?P<attempt>[1-9][0-9]{0,14})")


@dataclass(frozen=True, slots=True)
class LeaseId:
    """What a lease id names: one attempt of one generation of a task."""

    task_id: str
    generation: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.task_id}/{self.generation}/{self.attempt}"

    @classmethod
    def parse(cls, lease_id: str) -> "LeaseId | None":
        """The parts of a lease id, None when it is malformed."""
        match = _LEASE_ID.fullmatch(lease_id)
        if match is None:
            return None
        return cls(match["task_id"], int(match["generation"]), int(match["attempt"]))


def group_id(task_id: str, generation: int) -> str:
    """Id of the group that a generation of a task becomes."""
    return f"{task_id}/{generation}"
