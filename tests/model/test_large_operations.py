"""Model and store agree where the store works in portions: more victims, expiries or groups than one script takes; more
groups of a class than are read at once, and more environments than a run may have.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from buffer_service.domain import ops
from buffer_service.domain.ops import WeightVersion
from buffer_service.domain.policy import (
    MAX_ENVIRONMENTS,
    EnvironmentRule,
    Order,
    OverflowAction,
    RunPolicy,
    StaleAction,
    StalenessMeasure,
)
from tests.model.notation import PLAIN, Entry
from tests.model.pair import Pair
from tests.model.subjects import StoreSubject
from tests.oracle.engines import FORGOTTEN_MS

GROUPS = 2_300


def start(store: StoreSubject, **policy: Any) -> Pair:
    values = {"batch_groups": GROUPS, "max_queued_groups": GROUPS, "max_pending_tasks": 10_000, "lease_ttl_ms": 1_000}
    pair = Pair(store, "large", Counter())
    pair.create(RunPolicy(**(values | policy)))
    return pair


def facts(number: int, **fields: Any) -> ops.GroupFacts:
    sizes = {"tokens": 1 + number * 7_919 % 1_000, "loss_tokens": 1, "size_bytes": 10}
    return ops.GroupFacts(**(PLAIN["GroupFacts"] | {"task_id": f"task-{number}", **sizes, **fields}))


def push(pair: Pair, groups: Iterable[ops.GroupFacts]) -> Any:
    new = [ops.NewGroup(fact, b"payload of " + fact.task_id.encode()) for fact in groups]
    return pair.do(Entry("push", (new,), tuple(f"{group.facts.task_id}" for group in new)))


def fill(
    pair: Pair, groups: int = GROUPS, *, first: int = 0, leases: dict[int, str] | None = None, **fields: Any
) -> None:
    for begin in range(first, first + groups, 500):
        numbers = range(begin, min(begin + 500, first + groups))
        push(pair, [facts(number, lease_id=leases[number] if leases else "", **fields) for number in numbers])


def lease(pair: Pair, max_tasks: int, request_id: str) -> dict[int, str]:
    assert pair.view is not None
    ask = ops.LeaseAsk("w", "p", request_id, "e", pair.view.published, max_tasks)
    grants = pair.both("lease", ask).grants
    return {int(grant.task_id.removeprefix("task-")): grant.lease_id for grant in grants}


def submit(pair: Pair, count: int, environments: int = 1) -> None:
    tasks = [
        ops.NewTask(f"task-{number}", 2, number % 3, f"env-{number % environments}", b"") for number in range(count)
    ]
    pair.both("submit", ops.Submit(1, "tasks", 0, count, b"", tasks))


def pull(pair: Pair, *, rank: int = 0, world_size: int = 1, step: int = 0, **fields: Any) -> Any:
    assert pair.view is not None
    request = {"train_version": None} | fields
    return pair.both("pull", ops.Pull(pair.view.term, step, rank, world_size, **request))


def count(pair: Pair, state: str) -> int:
    assert pair.view is not None
    return pair.view.groups[state].groups


# Waiting admits few groups, and evicts them as recycling does.
@pytest.mark.parametrize("action", [StaleAction.DROP, StaleAction.RECYCLE])
def test_a_whole_queue_is_evicted_by_one_pull(store: StoreSubject, action: StaleAction) -> None:
    pair = start(store, max_staleness=0, stale_action=action)
    submit(pair, GROUPS)
    leases: dict[int, str] = {}
    for request in range(10):
        leases |= lease(pair, 256, f"request-{request}")
    fill(pair, leases=leases)
    assert pair.view is not None
    revision = pair.view.revision
    assert isinstance(pull(pair, train_version=1), ops.Short)
    assert pair.view.revision == revision + 1
    assert count(pair, "queued") == 0
    pair.do(Entry("sweep"))


def test_a_step_of_many_groups_is_sharded_committed_and_freed(store: StoreSubject) -> None:
    pair = start(store)
    fill(pair)
    for rank in range(7):
        assert isinstance(pull(pair, rank=rank, world_size=7), ops.Batch)
    pair.both("publish", ops.Publish(1, 1, b"manifest", 0))
    pair.both("checkpoint", 1, 0)
    pair.do(Entry("sweep"))
    assert pair.model.stored_bodies(pair.run_id) == 0
    fill(pair, first=GROUPS)
    assert count(pair, "accepted") == 2 * GROUPS


@pytest.mark.parametrize("mode", ops.ResumeMode)
def test_a_step_of_many_groups_is_taken_back(store: StoreSubject, mode: ops.ResumeMode) -> None:
    pair = start(store, max_queued_groups=GROUPS)
    fill(pair)
    pull(pair)
    fill(pair, 600, first=GROUPS)
    pair.both("resume", ops.Resume(0, mode, "resume", allow_regenerate=False))
    pull(pair, world_size=3, rank=2)
    pair.do(Entry("sweep"))


@pytest.mark.parametrize("mode", ops.ResumeMode)
def test_open_micro_batches_of_many_groups_are_taken_back_and_their_step_completed(
    store: StoreSubject, mode: ops.ResumeMode
) -> None:
    pair = start(store, micro_batch_groups=600, max_queued_groups=GROUPS, equal_shards=True)
    fill(pair)
    for number in range(3):
        assert not pull(pair, micro_batch=number).final
    pair.both("resume", ops.Resume(0, mode, "resume", allow_regenerate=False))
    if mode is ops.ResumeMode.REPLAY:
        assert pull(pair, world_size=2, rank=1, micro_batch=1).replayed
        last = 3
    else:
        if mode is ops.ResumeMode.DISCARD:
            fill(pair, GROUPS - 500, first=GROUPS)
        assert not pull(pair, world_size=2, rank=1).final
        last = 1
    for rank in range(2):
        assert pull(pair, world_size=2, rank=rank, micro_batch=last).final
    pair.do(Entry("sweep"))


def test_tombstones_of_many_dropped_groups_go_with_one_checkpoint(store: StoreSubject) -> None:
    pair = start(store, batch_groups=1, max_queued_groups=1)
    fill(pair, 1_500)
    pull(pair)
    pair.both("commit", 1, 0)
    assert count(pair, "dropped_overflow") == 1_499
    pair.both("checkpoint", 1, 0)
    pair.do(Entry("sweep"))
    fill(pair, 1_500, first=GROUPS)
    assert pair.view is not None
    assert pair.view.tasks["submitted"] == 3_000


def test_a_lease_request_takes_back_a_hundred_expired_leases_and_the_sweep_the_rest(store: StoreSubject) -> None:
    pair = start(store, retry_backoff_ms=0)
    submit(pair, 250)
    lease(pair, 250, "first")
    pair.do(Entry("time", (1_001,)))
    assert len(lease(pair, 256, "second")) == 100
    assert pair.view is not None
    assert pair.view.statistics["leases_expired"] == 100
    pair.do(Entry("sweep"))
    assert pair.view.statistics["leases_expired"] == 250
    assert len(lease(pair, 256, "third")) == 150


@pytest.mark.parametrize("measure", StalenessMeasure)
@pytest.mark.parametrize("order", Order)
def test_many_groups_of_several_subqueues_are_taken_in_order(
    store: StoreSubject, order: Order, measure: StalenessMeasure
) -> None:
    rules = (
        EnvironmentRule(environment="env-0", share=3),
        EnvironmentRule(environment="env-1", share=2, priority=1),
        EnvironmentRule(environment="env-3", share=0),
    )
    pair = start(store, batch_groups=150, order=order, staleness_measure=measure, environments=rules)
    submit(pair, 500, environments=4)
    leases = lease(pair, 256, "first") | lease(pair, 256, "second")
    versions = [WeightVersion(1, version) for version in range(9)]
    pair.both("publish", ops.Publish(1, versions[-1].version, b"manifest", None))
    spans = {number: sorted((number * 31 % 9, number * 17 % 9)) for number in range(500)}
    groups = [
        facts(
            number,
            lease_id=leases[number],
            environment=f"env-{number % 4}",
            head=versions[spans[number][0]],
            tail=versions[spans[number][1]],
            mean_milli=sum(spans[number]) * 500,
        )
        for number in range(500)
    ]
    push(pair, groups)
    for step in range(3):
        assert isinstance(pull(pair, step=step), ops.Batch)
    assert isinstance(pull(pair, step=3, batch_groups=50), ops.Batch)


def test_many_groups_are_dropped_to_make_room_for_one(store: StoreSubject) -> None:
    pair = start(store, max_queued_tokens=GROUPS, overflow_action=OverflowAction.DROP_OLDEST)
    fill(pair, 1_200, tokens=1)
    push(pair, [facts(GROUPS, tokens=GROUPS)])
    assert count(pair, "queued") == 1
    pair.do(Entry("sweep"))


def test_a_run_has_so_many_environments_and_no_more(store: StoreSubject) -> None:
    pair = start(store, filter_equal_rewards=True)
    submit(pair, 200, environments=200)
    groups = [facts(number, environment=f"pushed-{number}") for number in range(MAX_ENVIRONMENTS - 200)]
    push(pair, groups)
    refused = push(
        pair,
        [
            facts(300, environment="one more", equal_rewards=True),
            facts(301, environment="env-7", equal_rewards=True),
            facts(302, environment="pushed-7"),
        ],
    )
    assert [outcome.kind for outcome in refused.outcomes] == ["invalid", "filtered", "queued"]
    assert refused.outcomes[0].field == "environment"
    tasks = [ops.NewTask("known", 2, 0, "env-0", b""), ops.NewTask("unknown", 2, 0, "another", b"")]
    assert pair.both("submit", ops.Submit(1, "more", 200, 202, b"", tasks)) is None
    assert pair.seen["error:invalid_field:tasks[].environment"] == 1


def test_a_large_run_is_deleted_and_created_anew(store: StoreSubject) -> None:
    pair = start(store, record_groups=True, overflow_action=OverflowAction.BLOCK)
    submit(pair, GROUPS, environments=5)
    lease(pair, 256, "first")
    fill(pair, first=10_000)
    pull(pair)
    fill(pair, 1_500, first=20_000)
    fill(pair, 1_000, first=30_000)
    assert len(pair.waiting) == 200
    pair.both("delete_run")
    assert pair.view is None
    pair.do(Entry("sweep"))
    pair.create(RunPolicy(batch_groups=2))
    fill(pair, 2, first=10_000)
    assert isinstance(pull(pair), ops.Batch)


def test_hundreds_of_engines_and_workers_fall_silent_at_once(store: StoreSubject) -> None:
    pair = start(store, max_unavailable_engines=300, lease_ttl_ms=FORGOTTEN_MS)
    submit(pair, 200)
    loaded = WeightVersion(1, 0)
    for number in range(500):
        name = f"e{number:03}"
        asks = number % 2 == 0
        pair.both("report_engine", ops.EngineReport(name, name, "ready", loaded, 0, 0, "", 0, wants_load=asks))
        for worker_id in (name, f"{name}b"):
            pair.both("lease", ops.LeaseAsk(worker_id, "p", f"by {worker_id}", name, loaded, 1))
        if number == 249:
            pair.do(Entry("time", (1,)))
    holders = [(lease_id, lease.worker_id) for lease_id, lease in pair.inside.leases().items()]
    assert len(holders) == 200
    pair.do(Entry("time", (FORGOTTEN_MS - 1,)))
    for lease_id, worker_id in holders[:20]:
        pair.both("extend", worker_id, "p", [lease_id])
    pair.do(Entry("time", (1,)))
    pair.do(Entry("sweep"))
    assert pair.view is not None
    assert (len(pair.view.engines), pair.inside.workers()) == (250, 520)
