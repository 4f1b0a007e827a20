"""Batches of our AsyncBatchGenerator: their order, their weights, and what ends the wait for them."""

import itertools
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buffer_wire.errors import InvalidField, StaleTerm
from rollout_buffer.v1 import common_pb2
from tests.integrations.verifiers_scenes import DEADLINE_S, Ours, tasks_of
from tests.support.push import Pusher, group_of_lease
from tests.support.service import ServiceProcess
from trainer_client import BufferClient
from trainer_client.integrations.verifiers import POLICY, AsyncBatchGenerator, BatchResult, get_batch_slice
from trainer_client.publish import FilesPublisher

RUNS = itertools.count()


@pytest.fixture
def ours(service: ServiceProcess) -> Iterator[Ours]:
    made = Ours(service, f"run-{next(RUNS)}")
    yield made
    made.close()


def rows_of(result: BatchResult) -> list[tuple[object, object]]:
    return [(group.metadata["batch"], group.metadata["row"]) for group in result.groups]


def test_groups_come_in_the_order_of_the_tasks(ours: Ours) -> None:
    generator = ours.generator()
    generator.start()
    generator.submit_batch(5, tasks_of(5, 6))
    ours.release(5)
    result = generator.get_batch(5)
    assert rows_of(result) == [(5, row) for row in range(6)]
    assert rows_of(pickle.loads(pickle.dumps(result))) == rows_of(result)
    generator.stop()


@pytest.mark.parametrize(("ahead", "pending"), [(0, [0, 0, 0, 0]), (1, [1, 1, 1, 0]), (2, [2, 2, 1, 0])])
def test_batches_run_ahead_of_the_trainer_and_no_further(ours: Ours, ahead: int, pending: list[int]) -> None:
    generator = ours.generator(num_batches_ahead=ahead)
    generator.start()
    ours.release(0)
    ahead_of = []
    for step, result in enumerate(generator.batches(tasks_of(i) for i in range(4))):
        assert (result.batch_id, rows_of(result)) == (step, [(step, 0), (step, 1)])
        ahead_of.append(generator.get_pending_count())
        assert generator.publish() == step + 1
        ours.release(step + 1)
    assert ahead_of == pending
    run = ours.client.run(ours.run_id)
    assert (run.published.version, run.ledger.groups.trained.groups, run.ledger.balanced) == (4, 8, True)
    generator.stop()


def test_weights_are_published_and_what_was_pulled_is_committed(ours: Ours, tmp_path: Path) -> None:
    with FilesPublisher(tmp_path) as publisher:
        generator = ours.generator(publisher=publisher)
        generator.start()
        ours.submit(generator, 0)
        ours.release(0)
        generator.get_batch(0)
        assert generator.publish(lambda folder: (folder / "model").write_text("weights")) == 1
        assert publisher.versions == [1]
        generator.stop()
    assert ours.client.run(ours.run_id).committed_steps == 2


def test_a_failed_task_fails_its_batch_and_no_other(service: ServiceProcess) -> None:
    run_id = f"run-{next(RUNS)}"
    with BufferClient(service.address) as client:
        policy = replace(POLICY, max_attempts=1, lease_ttl_ms=1_000)
        generator = AsyncBatchGenerator(client, run_id, policy=policy)
        generator.start()
        for batch_id in (0, 1):
            generator.submit_batch(batch_id, tasks_of(batch_id, 1))
        with Pusher(service.address, run_id) as pusher:
            leases = {int(lease.task.metadata_json[9]): lease for lease in pusher.lease(max_tasks=1).leases}
            # Batch 0 was leased by a worker that is never heard of again.
            assert list(leases) == [0]
            with pytest.raises(RuntimeError, match=r"Batch 0 generation failed: task .* failed after 1 attempts"):
                generator.get_batch(0, timeout=DEADLINE_S)
            [lease] = pusher.lease(max_tasks=1).leases
            pusher.push(group_of_lease(lease, common_pb2.WeightVersion(term=1)))
        assert rows_of(generator.get_batch(1)) == [(1, 0)]
        assert generator.get_pending_count() == 0
        generator.stop()


def test_what_uses_groups_again_is_refused_by_name(ours: Ours) -> None:
    again: dict[str, Any] = {"max_uses": 2, "reuse_share_milli": 1_000, "reuse_max_staleness": 9}
    with pytest.raises(InvalidField, match=r"policy\.max_uses"):
        ours.generator(policy=replace(POLICY, **again))
    generator = ours.generator()
    generator.start()
    ours.client.update_policy(ours.run_id, **again)
    for batch_id in range(2):
        ours.submit(generator, batch_id)
        ours.release(batch_id)
    generator.get_batch(0)
    generator.publish()
    with pytest.raises(RuntimeError, match=r"policy\.max_uses.*trained on before"):
        generator.get_batch(1)


def test_cancelled_tasks_end_the_wait(ours: Ours) -> None:
    generator = ours.generator()
    generator.start()
    ours.client.drain_run(ours.run_id)
    with pytest.raises(RuntimeError, match="Batch 0 generation failed"):
        generator.get_batch(0, timeout=DEADLINE_S)
    generator.stop()


def test_what_ends_all_generation_is_raised_in_the_caller(ours: Ours) -> None:
    generator = ours.generator()
    generator.start()
    ours.submit(generator, 0)
    successor = ours.generator()
    successor.start()
    with pytest.raises(RuntimeError, match="Batch 0 generation failed") as raised:
        generator.get_batch(0)
    assert isinstance(raised.value.__cause__, StaleTerm)
    # Groups of the earlier generator's batch are nobody's.
    ours.submit(successor, 1)
    ours.release(0)
    ours.release(1)
    assert rows_of(successor.get_batch(1)) == [(1, 0), (1, 1)]
    generator.stop()
    successor.stop()


def test_every_process_gets_its_groups_or_the_error(ours: Ours) -> None:
    generator = ours.generator(generation_timeout=0.3)
    generator.start()
    generator.submit_batch(0, tasks_of(0, 4))
    box: list[Any] = []

    def sent(entries: list[Any]) -> None:
        box[:] = pickle.loads(pickle.dumps(entries))

    def received(entries: list[Any]) -> None:
        entries[:] = pickle.loads(pickle.dumps(box))

    for rank, (held, broadcast) in enumerate([(generator, sent), (None, received)]):
        with pytest.raises(TimeoutError, match="Batch 0 generation timed out"):
            get_batch_slice(held, 0, rank, 2, broadcast)
    ours.release(0)
    ours.until_generated(generator, 2)
    generator.generation_timeout = DEADLINE_S
    slices = [get_batch_slice(generator, 0, 0, 2, sent)[1], get_batch_slice(None, 0, 1, 2, received)[1]]
    assert [[group.metadata["row"] for group in part] for part in slices] == [[0, 1], [2, 3]]
    with pytest.raises(InvalidField, match="world_size"):
        get_batch_slice(None, 0, 2, 3, received)
    generator.stop()
