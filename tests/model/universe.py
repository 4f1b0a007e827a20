"""The small world that the machine draws from: few names, tiny caps, times that cross every expiry."""

from typing import Any

from hypothesis import strategies as st

from buffer_service.domain.policy import UNSET, OverflowAction, RunPolicy, StaleAction

WORKERS = ("w1", "w2")
INSTANCES = ("p1", "p2")
ENGINES = ("e1", "e2")
TASKS = tuple("abcdefgh")
OWN_TASKS = ("own1", "own2", "own3", "own4", "own5", "own6")
TIME_STEPS_MS = (1, 400, 3_000, -500)
BODY_KINDS = (b"", b"x" * 10, bytes(range(256)))
MIB = 1 << 20


def _unset_or(low: int, high: int) -> st.SearchStrategy[int]:
    return st.one_of(st.just(UNSET), st.integers(low, high))


@st.composite
def policies(draw: st.DrawFn) -> RunPolicy:
    """Policies under which every rule can be met within a few operations."""
    groups = draw(st.integers(1, 3))
    prefetch, per_publish = draw(st.sampled_from([(0, 1), (0, 1), (1, 1), (2, 1), (0, 2), (1, 2)]))
    least = (prefetch + per_publish - 1) // per_publish
    values: dict[str, Any] = {
        "batch_groups": groups,
        "max_queued_groups": groups + draw(st.integers(0, 3)),
        "max_queued_tokens": draw(st.sampled_from([0, 0, 20, 40])),
        "max_queued_bytes": draw(st.sampled_from([MIB, 8 * MIB])),
        "overflow_action": draw(st.sampled_from(OverflowAction)),
        "max_staleness": draw(st.sampled_from([UNSET, least, least, least + 1, least + 2])),
        "stale_action": draw(st.sampled_from(StaleAction)),
        "max_inflight_groups": draw(st.sampled_from([0, 0, 1, 3])),
        "reserve_queue_space": draw(st.sampled_from([False, False, True])),
        "max_lookahead": draw(_unset_or(least, least + 2)),
        "lease_ttl_ms": draw(st.sampled_from([1_000, 2_500])),
        "max_attempts": draw(st.integers(1, 3)),
        "retry_backoff_ms": draw(st.sampled_from([0, 100])),
        "failure_budget": draw(st.sampled_from([UNSET, UNSET, 0, 1])),
        "max_pending_tasks": draw(st.sampled_from([10_000, 10_000, 4])),
        "prefetch_batches": prefetch,
        "batches_per_publish": per_publish,
        "retained_steps": draw(st.sampled_from([1, 3, 64])),
    }
    return RunPolicy(**values)


@st.composite
def group_sizes(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes of a group, with some that exceed a cap on their own."""
    tokens = draw(st.sampled_from([1, 5, 5, 8, 20, 21, 41]))
    return {
        "environment": draw(st.sampled_from(["math", "code"])),
        "samples": draw(st.integers(1, 4)),
        "tokens": tokens,
        "loss_tokens": draw(st.integers(0, tokens)),
        "size_bytes": draw(st.sampled_from([0, 100, 100, 400_000, MIB, MIB + 1])),
        "spans_versions": draw(st.booleans()),
    }
