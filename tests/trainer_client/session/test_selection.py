"""Filters and samplers as functions, in a session on a real service."""

import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest

from buffer_wire.errors import InvalidField
from tests.support.push import PushingWorker
from tests.support.service import ServiceProcess
from tests.trainer_client.test_service import ids, tasks
from trainer_client import (
    BatchInfo,
    BufferClient,
    ClientOptions,
    Policy,
    Rejected,
    SelectionFailed,
    SessionOptions,
    TrainerSession,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

HERE = "tests.trainer_client.selection.functions"
WHOLE = Policy(batch_groups=4, max_queued_groups=8, overflow_action="block", record_groups=True)
STREAMED = Policy(batch_groups=4, micro_batch_groups=2, max_queued_groups=6, overflow_action="block")


def options(**changes: object) -> SessionOptions:
    named: Mapping[str, object] = {
        name: f"{HERE}:{value}" if name in ("filter", "sampler") else value for name, value in changes.items()
    }
    return SessionOptions(pull_timeout_s=30, **named)  # type: ignore[arg-type]


def test_others_take_the_place_of_what_a_filter_gives_back(
    service: ServiceProcess, client: BufferClient, run_id: str
) -> None:
    trained = []
    with (
        PushingWorker(service.address, run_id),
        client.session(run_id, policy=WHOLE, tasks=tasks(9), options=options(filter="solved")) as session,
    ):
        for batch in session:
            assert (len(batch.groups), batch.final) == (4, True)
            trained += ids(batch)
            session.publish()
        run = session.state()
    assert sorted(trained) == sorted(f"t{i}" for i in range(9) if i != 3)
    assert (run.ledger.groups.rejected.groups, run.ledger.groups.trained.groups) == (1, 8)
    moved = [record.moved for record in client.read_records(run_id, "", 1_000) if record.HasField("moved")]
    assert [(one.group_id, one.state, one.reason) for one in moved] == [("t3/0", "rejected", f"filter {HERE}:solved")]


def test_a_filter_takes_part_where_micro_batches_come_one_by_one(
    service: ServiceProcess, client: BufferClient, run_id: str
) -> None:
    steps: dict[int, list[str]] = {}
    with (
        PushingWorker(service.address, run_id),
        client.session(run_id, policy=STREAMED, tasks=tasks(9), options=options(filter="solved")) as session,
    ):
        for micro in session.micro_batches():
            steps.setdefault(micro.step, []).extend(ids(micro))
            if micro.final:
                session.publish()
    assert [len(names) for names in steps.values()] == [4, 4]
    assert not any("t3" in names for names in steps.values())


def test_a_sampler_makes_batches_of_what_it_chooses(service: ServiceProcess, client: BufferClient, run_id: str) -> None:
    with (
        PushingWorker(service.address, run_id),
        client.session(run_id, policy=WHOLE, tasks=tasks(8), options=options(sampler="best_two")) as session,
    ):
        for batch in session:
            assert (len(batch.groups), batch.info.total_groups, batch.final) == (2, 2, True)
            session.publish()
        run = session.state()
    assert (run.ledger.groups.rejected.groups, run.ledger.groups.trained.groups, run.committed_steps) == (4, 4, 2)


def test_one_that_fails_stops_nothing_else_and_the_batch_is_there_again(
    service: ServiceProcess, client: BufferClient, run_id: str
) -> None:
    with (
        PushingWorker(service.address, run_id) as worker,
        client.session(
            run_id,
            policy=WHOLE,
            tasks=tasks(12),
            options=options(filter="hangs", selection_timeout_s=0.2),
        ) as session,
    ):
        for _ in range(2):
            with pytest.raises(SelectionFailed, match="functions:hangs has not answered"):
                next(session)
        assert session.next_step == 0
        session.commit()
    # The feeder and the worker went on: the queue is full beside the batch in hand.
    assert len(worker.acknowledged) >= 4
    with (
        PushingWorker(service.address, run_id),
        client.session(run_id, tasks=tasks(12), next_step=0, options=options(filter="solved")) as session,
    ):
        batch = next(session)
    assert (batch.step, len(batch.groups), batch.final) == (0, 4, True)
    assert "t3" not in ids(batch)


def test_a_batch_that_stays_smaller_after_a_failure_is_trained_and_committed(
    service: ServiceProcess, client: BufferClient, run_id: str
) -> None:
    with (
        PushingWorker(service.address, run_id),
        client.session(run_id, policy=WHOLE, tasks=tasks(4), options=options(filter="solved_at_second_try")) as session,
    ):
        with pytest.raises(SelectionFailed, match="difficulty"):
            next(session)
        assert session.next_step == 0
        assert (len(next(session).groups), session.next_step) == (3, 1)
        session.publish()
        run = session.state()
    assert (run.committed_steps, run.ledger.groups.trained.groups, run.ledger.balanced) == (1, 3, True)


def test_a_filter_that_gives_back_again_and_again_is_told_of(
    service: ServiceProcess, client: BufferClient, run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "trainer_client")
    with (
        PushingWorker(service.address, run_id),
        client.session(run_id, policy=WHOLE, tasks=tasks(80), options=options(filter="late")) as session,
    ):
        assert len(next(session).groups) == 4
    assert [record.message for record in caplog.records] == [f"{HERE}:late has given groups of step 0 back 8 times"]


def test_ranks_select_together(service: ServiceProcess, client: BufferClient, run_id: str) -> None:
    barrier = threading.Barrier(2, timeout=30)
    made: dict[int, list[str]] = {}
    policy = Policy(batch_groups=4, equal_shards=True, max_queued_groups=8, overflow_action="block")
    both = options(filter="solved", sampler="best_two", barrier=barrier.wait)

    def rank(number: int, session: TrainerSession) -> None:
        batch = next(session)
        assert (batch.info.total_groups, batch.final) == (4, True)
        made[number] = ids(batch)

    with (
        PushingWorker(service.address, run_id),
        client.session(run_id, policy=policy, tasks=tasks(8), world_size=2, options=both) as leader,
        BufferClient(service.address) as other,
        other.session(run_id, rank=1, world_size=2, start=leader.start, options=both) as follower,
    ):
        threads = [threading.Thread(target=rank, args=(i, each)) for i, each in enumerate((leader, follower))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert leader.state().ledger.groups.rejected.groups == 1
    assert sorted(made[0] + made[1]) == ["t0", "t1", "t2", "t4"]


class Quick(BufferClient):
    """A client that says when it gives groups back for the second time."""

    def __init__(self, address: str, again: threading.Event) -> None:
        super().__init__(address, ClientOptions(timeout_s=20))
        self._again, self._times = again, 0

    def reject(self, run_id: str, **given: Any) -> Rejected:
        said = super().reject(run_id, **given)
        self._times += bool(given["group_ids"])
        if self._times == 2:
            self._again.set()
        return said


class Slow(BufferClient):
    """A client whose first look behind a barrier comes after the second rejection of the other, if that may be."""

    def __init__(self, address: str, again: threading.Event) -> None:
        super().__init__(address, ClientOptions(timeout_s=20))
        self._again, self._looks = again, 0

    def reject(self, run_id: str, **given: Any) -> Rejected:
        self._looks += 1
        if self._looks == 2:
            self._again.wait(1)
        return super().reject(run_id, **given)


def test_no_rank_gives_groups_back_again_before_all_have_seen_what_is_lacking(
    service: ServiceProcess, run_id: str
) -> None:
    barrier, again = threading.Barrier(2, timeout=10), threading.Event()
    made: dict[int, BatchInfo] = {}
    policy = Policy(batch_groups=4, equal_shards=True, max_queued_groups=12, overflow_action="block")

    def rank(number: int, session: TrainerSession) -> None:
        made[number] = next(session).info

    with (
        PushingWorker(service.address, run_id),
        Quick(service.address, again) as quick,
        Slow(service.address, again) as slow,
        quick.session(
            run_id,
            policy=policy,
            tasks=tasks(16),
            world_size=2,
            options=options(filter="third_choice", barrier=barrier.wait),
        ) as leader,
        slow.session(
            run_id,
            rank=1,
            world_size=2,
            start=leader.start,
            options=options(filter="everything", barrier=barrier.wait),
        ) as follower,
    ):
        threads = [threading.Thread(target=rank, args=(i, each)) for i, each in enumerate((leader, follower))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [(made[i].final, made[i].total_groups, made[i].micro_batch) for i in (0, 1)] == [(True, 4, 2)] * 2
    assert made[0].total_tokens == made[1].total_tokens


def test_a_sampler_of_parts_of_steps_is_refused(service: ServiceProcess, client: BufferClient, run_id: str) -> None:
    with (
        PushingWorker(service.address, run_id),
        client.session(run_id, policy=STREAMED, tasks=tasks(8), options=options(sampler="best_two")) as session,
        pytest.raises(InvalidField, match="sampler"),
    ):
        next(session.micro_batches())
