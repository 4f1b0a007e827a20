"""Admission: how many more groups may be started, the smallest room under the caps that are set.

Computed from what exists (cardinalities), never from running totals, so groups that are dropped or lost free capacity
by being gone.
"""

from dataclasses import dataclass

from buffer_service.domain.policy import UNSET, RunPolicy


@dataclass(frozen=True, slots=True)
class OpenStep:
    """The step whose rounds are not all closed: its groups when it is full, and those that it has."""

    target: int = 0
    groups: int = 0


NO_OPEN_STEP = OpenStep()


def capacity(policy: RunPolicy, *, unpublished_steps: int, open_step: OpenStep, queued: int, leased: int) -> int | None:
    """Groups that may still be leased, None without a cap; zero or less means none.

    max_inflight_groups - leased; with reserve_queue_space max_queued_groups - (queued + leased); with max_lookahead k
    ((k + 1) * b - unpublished_steps) * N - (forming + queued + leased) for batches of N groups and b batches per
    publish. `unpublished_steps`: complete steps that the last publish did not cover.

    The last is the bound of AReaL, (k + version + 1) * N - (accepted + running), as long as every step has N groups and
    every version b steps; counted in steps, it also holds when batches differ in size, versions leave gaps, or a
    resume starts between two publishes. An open step larger than N is a batch of its own size.
    """
    rooms = []
    if policy.max_inflight_groups > 0:
        rooms.append(policy.max_inflight_groups - leased)
    if policy.reserve_queue_space:
        rooms.append(policy.max_queued_groups - (queued + leased))
    if policy.max_lookahead != UNSET:
        steps = (policy.max_lookahead + 1) * policy.batches_per_publish - unpublished_steps
        size = max(policy.batch_groups, open_step.target)
        rooms.append(steps * size - (open_step.groups + queued + leased))
    return min(rooms, default=None)
