"""The staleness gate: whether work is still fresh enough for the version that will train on it.

staleness = train_version - head_version, in versions; too stale is what exceeds max_staleness (η). Without η the gate
is open.
"""

from buffer_service.domain.policy import UNSET, RunPolicy


def too_stale(policy: RunPolicy, *, train_version: int, head_version: int) -> bool:
    """Whether tokens with this head must not be trained by train_version."""
    return policy.max_staleness != UNSET and train_version - head_version > policy.max_staleness


def oldest_useful_version(policy: RunPolicy, train_version: int) -> int:
    """The oldest weights from which work for train_version may start: max(0, train_version - η)."""
    return 0 if policy.max_staleness == UNSET else max(0, train_version - policy.max_staleness)
