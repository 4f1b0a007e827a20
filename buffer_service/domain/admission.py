"""Admission: how many more groups may be started, the smallest room under the caps that are set.

Computed from what exists (cardinalities), never from running totals, so groups that are dropped or lost free capacity
by being gone.
"""

from buffer_service.domain.policy import UNSET, RunPolicy


def capacity(policy: RunPolicy, *, published_version: int, assembled: int, queued: int, leased: int) -> int | None:
    """Groups that may still be leased, None without a cap; zero or less means none.

    max_inflight_groups - leased; with reserve_queue_space max_queued_groups - (queued + leased); with max_lookahead k
    the bound of AReaL, (k + published_version + 1) * N * b - (assembled + queued + leased), for batches of N groups and
    b batches per publish. `assembled`: groups of all steps assembled in the present timeline.
    """
    rooms = []
    if policy.max_inflight_groups > 0:
        rooms.append(policy.max_inflight_groups - leased)
    if policy.reserve_queue_space:
        rooms.append(policy.max_queued_groups - (queued + leased))
    if policy.max_lookahead != UNSET:
        versions = policy.max_lookahead + published_version + 1
        groups = versions * policy.batch_groups * policy.batches_per_publish
        rooms.append(groups - (assembled + queued + leased))
    return min(rooms, default=None)
