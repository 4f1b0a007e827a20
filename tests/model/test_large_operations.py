"""Model and store agree where the store works in portions: more victims, expiries or groups than one script takes."""

from collections import Counter
from typing import Any

import pytest

from buffer_service.domain import ops
from buffer_service.domain.ops import WeightVersion
from buffer_service.domain.policy import RunPolicy, StaleAction
from tests.model.pair import Pair
from tests.model.subjects import StoreSubject

GROUPS = 2_300


def start(store: StoreSubject, **policy: Any) -> Pair:
    values = {"batch_groups": GROUPS, "max_queued_groups": GROUPS, "max_pending_tasks": 10_000, "lease_ttl_ms": 1_000}
    return Pair(store, "large", RunPolicy(**(values | policy)), Counter())


def push(pair: Pair, numbers: range, *, leases: dict[int, str] | None = None) -> None:
    facts = [
        ops.GroupFacts(
            task_id=f"task-{number}",
            generation=0,
            lease_id=leases[number] if leases else "",
            environment="math",
            samples=2,
            tokens=1 + number * 7_919 % 1_000,
            loss_tokens=1,
            size_bytes=10,
            head=WeightVersion(1, 0),
            tail=WeightVersion(1, 0),
            spans_versions=False,
        )
        for number in numbers
    ]
    pair.push([ops.NewGroup(fact, b"payload of " + fact.task_id.encode()) for fact in facts])


def fill(pair: Pair, groups: int = GROUPS) -> None:
    for first in range(0, groups, 500):
        push(pair, range(first, min(first + 500, groups)))


def lease(pair: Pair, max_tasks: int, request_id: str) -> dict[int, str]:
    ask = ops.LeaseAsk("w", "p", request_id, "e", pair.view.published, max_tasks)
    grants = pair.both("lease", ask).grants
    return {int(grant.task_id.removeprefix("task-")): grant.lease_id for grant in grants}


def submit(pair: Pair, count: int) -> None:
    tasks = [ops.NewTask(f"task-{number}", 2, 0, "math", b"") for number in range(count)]
    pair.both("submit", ops.Submit(1, "tasks", 0, count, b"", tasks))


def pull(pair: Pair, *, rank: int = 0, world_size: int = 1, train_version: int | None = None, step: int = 0) -> Any:
    return pair.both("pull", ops.Pull(pair.view.epoch, step, rank, world_size, train_version))


@pytest.mark.parametrize("action", StaleAction)
def test_a_whole_queue_is_evicted_by_one_pull(store: StoreSubject, action: StaleAction) -> None:
    pair = start(store, max_staleness=0, stale_action=action)
    submit(pair, GROUPS)
    leases: dict[int, str] = {}
    for request in range(10):
        leases |= lease(pair, 256, f"request-{request}")
    for first in range(0, GROUPS, 500):
        push(pair, range(first, min(first + 500, GROUPS)), leases=leases)
    revision = pair.view.revision
    assert isinstance(pull(pair, train_version=1), ops.Short)
    assert pair.view.revision == revision + 1
    assert pair.view.groups["queued"].groups == 0
    pair.sweep()


def test_a_step_of_many_groups_is_sharded_committed_and_freed(store: StoreSubject) -> None:
    pair = start(store)
    fill(pair)
    for rank in range(7):
        assert isinstance(pull(pair, rank=rank, world_size=7), ops.Batch)
    pair.both("publish", ops.Publish(1, 1, b"manifest", 0))
    pair.both("checkpoint", 1, 0)
    pair.sweep()
    assert pair.model.stored_bodies(pair.run_id) == 0
    fill(pair)
    assert pair.view.groups["accepted"].groups == 2 * GROUPS


@pytest.mark.parametrize("mode", ops.ResumeMode)
def test_a_step_of_many_groups_is_taken_back(store: StoreSubject, mode: ops.ResumeMode) -> None:
    pair = start(store, max_queued_groups=GROUPS)
    fill(pair)
    pull(pair)
    push(pair, range(GROUPS, GROUPS + 600))
    pair.both("resume", ops.Resume(0, mode, "resume", allow_regenerate=False))
    pull(pair, world_size=3, rank=2)
    pair.sweep()


def test_tombstones_of_many_dropped_groups_go_with_one_checkpoint(store: StoreSubject) -> None:
    pair = start(store, batch_groups=1, max_queued_groups=1)
    fill(pair, 1_500)
    pull(pair)
    pair.both("commit", 1, 0)
    assert pair.view.groups["dropped_overflow"].groups == 1_499
    pair.both("checkpoint", 1, 0)
    pair.sweep()
    fill(pair, 1_500)
    assert pair.view.tasks["submitted"] == 3_000


def test_a_lease_request_takes_back_a_hundred_expired_leases_and_the_sweep_the_rest(store: StoreSubject) -> None:
    pair = start(store, retry_backoff_ms=0)
    submit(pair, 250)
    lease(pair, 250, "first")
    pair.advance(1_001)
    assert len(lease(pair, 256, "second")) == 100
    assert pair.view.statistics["leases_expired"] == 100
    pair.sweep()
    assert pair.view.statistics["leases_expired"] == 250
    assert len(lease(pair, 256, "third")) == 150
