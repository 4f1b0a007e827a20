"""The staleness gate: whether work is still fresh enough for the version that will train on it.

staleness = train_version - version, in versions; too stale is what exceeds max_staleness (η). The policy's
staleness_measure names the version that counts: of the group's oldest first token (head), of its newest token (tail),
or the mean over its tokens. Ages are versions in milli-versions, so that a mean needs no fraction. Without η the gate
is open.
"""

from typing import assert_never

from buffer_service.domain.policy import UNSET, RunPolicy, StalenessMeasure

MILLI = 1_000


def age_milli(measure: StalenessMeasure, *, head: int, tail: int, mean_milli: int) -> int:
    """The version by which a group is measured, in milli-versions; the smaller, the staler."""
    match measure:
        case StalenessMeasure.HEAD:
            return head * MILLI
        case StalenessMeasure.MEAN:
            return mean_milli
        case StalenessMeasure.TAIL:
            return tail * MILLI
        case _:
            assert_never(measure)


def aged_out(policy: RunPolicy, *, train_version: int, age_milli: int) -> bool:
    """Test whether a group of this age must not be trained by train_version."""
    return policy.max_staleness != UNSET and train_version * MILLI - age_milli > policy.max_staleness * MILLI


def too_stale(policy: RunPolicy, *, train_version: int, head_version: int) -> bool:
    """Test whether tokens with this head must not be trained by train_version, whatever the measure."""
    return policy.max_staleness != UNSET and train_version - head_version > policy.max_staleness


def oldest_useful_version(policy: RunPolicy, train_version: int) -> int:
    """The oldest weights from which work for train_version may start: max(0, train_version - η)."""
    return 0 if policy.max_staleness == UNSET else max(0, train_version - policy.max_staleness)
