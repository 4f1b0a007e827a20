"""The machine can fail: each of these subjects breaks one rule of the model, and the machine notices."""

from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest

from buffer_service.domain import ops
from buffer_service.domain.admission import capacity
from buffer_service.domain.failures import over_budget
from buffer_service.domain.gate import too_stale
from buffer_service.domain.model import batches, leasing, state
from buffer_service.domain.model.leases import LeaseBook
from buffer_service.domain.model.pending import PendingTasks
from buffer_service.domain.model.queue import GroupQueue
from buffer_service.domain.model.records import Payloads, Task
from buffer_service.domain.model.state import RunState
from buffer_service.domain.policy import RunPolicy
from buffer_service.domain.timeline import Timeline
from buffer_service.domain.transitions import GroupState
from tests.model.budget import explore
from tests.model.pair import Disagreement
from tests.model.subjects import ModelSubject

OPERATIONS = 6_000


class Mutant(ModelSubject):
    """A model in which one function is another while it works; the model beside it keeps the original."""

    def __init__(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        super().__init__()
        self._change = owner, name, replacement

    def call(self, operation: str, run_id: str, *args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(*self._change):
            return super().call(operation, run_id, *args, **kwargs)

    def sweep(self, run_id: str) -> None:
        with mock.patch.object(*self._change):
            super().sweep(run_id)


def newest_is_dropped(run: RunState) -> None:
    group = max(run.queue, key=lambda group: group.sequence)
    run.dequeue(group, GroupState.DROPPED_OVERFLOW)
    run.end_group(group)


_live = LeaseBook.live


def a_millisecond_more(book: LeaseBook, lease_id: str, worker_id: str, instance_id: str, now: int) -> Task | None:
    return _live(book, lease_id, worker_id, instance_id, now - 1)


def a_version_more(policy: RunPolicy, *, train_version: int, head_version: int) -> bool:
    return too_stale(policy, train_version=train_version, head_version=head_version + 1)


def queued_are_not_counted(policy: RunPolicy, **counts: int) -> int | None:
    return capacity(policy, **{**counts, "queued": 0})


def one_failure_more(policy: RunPolicy, failed_tasks: int) -> bool:
    return over_budget(policy, failed_tasks - 1)


def not_clamped(timeline: Timeline, weights: ops.WeightVersion) -> int:
    return weights.version


def caps_hold_always(queue: GroupQueue, policy: RunPolicy, facts: ops.GroupFacts | None = None) -> bool:
    return facts is None or _fits(queue, policy, facts)


_fits = GroupQueue.fits


def in_turn(groups: Iterable[tuple[int, int]], world_size: int) -> list[list[int]]:
    sequences = sorted(sequence for sequence, _ in groups)
    return [sequences[rank::world_size] for rank in range(world_size)]


_add = PendingTasks.add


def all_priorities_are_equal(pending: PendingTasks, task: Task) -> None:
    task.priority = 0
    _add(pending, task)


def failures_are_kept(run: RunState, task: Task) -> None:
    failures = task.failures
    _start_anew(run, task)
    task.failures = failures


_start_anew = RunState.start_anew

MUTANTS: dict[str, tuple[str, Any, str, Callable[..., Any]]] = {
    # Found in histories of this mood, by this function being another.
    "the newest group is dropped, not the oldest": ("steady", RunState, "drop_oldest", newest_is_dropped),
    "a lease lives a millisecond too long": ("interrupted", LeaseBook, "live", a_millisecond_more),
    "the gate at assembly is open by a version": ("steady", batches, "too_stale", a_version_more),
    "the gate at the lease is open by a version": ("troubled", leasing, "too_stale", a_version_more),
    "queued groups take no capacity": ("short of everything", leasing, "capacity", queued_are_not_counted),
    "back-off never doubles": ("resumed", leasing, "backoff_ms", lambda policy, _: policy.retry_backoff_ms),
    "the budget allows one failure more": ("short of everything", state, "over_budget", one_failure_more),
    "versions of an abandoned timeline count in full": ("interrupted", Timeline, "effective", not_clamped),
    "queued groups are not clamped by a resume": ("interrupted", GroupQueue, "clamp", lambda *_: None),
    "continuations are not clamped by a resume": ("interrupted", Task, "clamp", lambda *_: None),
    "a requeue ignores the caps": ("interrupted", GroupQueue, "fits", caps_hold_always),
    "ranks are filled in turn": ("resumed", batches, "shard", in_turn),
    "all priorities are equal": ("troubled", PendingTasks, "add", all_priorities_are_equal),
    "a task that starts anew keeps its failures": ("steady", RunState, "start_anew", failures_are_kept),
    "payloads are never deleted": ("interrupted", Payloads, "trash", lambda *_: None),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MUTANTS)
def test_the_machine_finds(name: str) -> None:
    mood, owner, function, replacement = MUTANTS[name]
    with pytest.raises(Disagreement):
        explore(Mutant(owner, function, replacement), OPERATIONS, moods=[mood], shrink=False)
