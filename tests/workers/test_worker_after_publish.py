"""A worker and a real service around a publish: what it admits is begun with the weights that it brings."""

import asyncio
import itertools
from pathlib import Path

import pytest

from rollout_workers.engine.options import SimulatedOptions
from rollout_workers.engine.simulated.hosts import own_hosts
from rollout_workers.worker import Worker
from tests.support.service import ServiceProcess
from tests.workers.building import length_reward, options
from tests.workers.training import OPTIONS, endless, until, write_weights
from trainer_client import BufferClient, Policy
from trainer_client.publish import FilesPublisher

STEPS = 4
N = 2


def train(client: BufferClient, run_id: str, directory: Path) -> list[int]:
    """Pull, publish, and wait until all that the publish admits is queued; the staleness of every group pulled."""
    policy = Policy(preset="one_step_off", batch_groups=N)
    with (
        FilesPublisher(directory) as publisher,
        client.session(run_id, policy=policy, tasks=endless(8, 2), publisher=publisher, options=OPTIONS) as session,
    ):
        staleness = []
        for batch in itertools.islice(session, STEPS):
            until(lambda: client.ledger(run_id).groups.queued.groups == N, "the next batch is queued")
            staleness += [group.train_version - group.head_version for group in batch.groups]
            session.publish(write_weights(b"%d" % batch.step))
            until(lambda: client.ledger(run_id).groups.queued.groups == 2 * N, "the queue is full")
        return staleness


async def test_what_a_publish_admits_is_begun_with_its_weights_as_soon_as_they_are_loaded(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A worker that asked again by the clock would come too late for the test.
    monkeypatch.setattr("rollout_workers.tasks.dispatcher._AFTER_QUICK_ANSWER_S", 600.0)
    simulated = SimulatedOptions(tokens_per_s=2_000.0, length_median=8.0)
    given = options(
        service.address, tmp_path, run_id=run_id, simulated=simulated, groups_per_engine=2 * N, lease_wait_s=30.0
    )
    worker = Worker(given, reward=length_reward, hosts=own_hosts(given))
    running = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(200):
            staleness = await asyncio.to_thread(train, client, run_id, tmp_path / "published")
            worker.stop()
            await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert staleness == [0] * N + [1] * (STEPS - 1) * N
    assert client.ledger(run_id).groups.dropped_stale.groups == 0
