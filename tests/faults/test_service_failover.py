"""The whole service over Sentinels: a training loop and a worker that go on when the store's primary is killed."""

import asyncio
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.support.push import PushingWorker
from tests.support.sentinels import Deployment, sentinels
from tests.support.service import ServiceProcess, running_service
from trainer_client import BufferClient, ClientOptions, Policy, SamplingParams, SessionOptions, Task

pytestmark = pytest.mark.faults

STEPS, BATCH, KILL_AT = 24, 3, 8
NOT_READY_S = 20.0


def tasks() -> list[Task]:
    sampling = SamplingParams(max_new_tokens=8)
    return [
        Task(task_id=f"t{i}", group_size=2, sampling=sampling, prompt_token_ids=[1, 2]) for i in range(STEPS * BATCH)
    ]


def readiness(service: ServiceProcess) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{service.admin}/readyz", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


class Failover:
    """Kills the primary, sees the service say so, and brings it back as a replica, in a thread of its own.

    The server that comes back is started by the main thread, with which it dies.
    """

    def __init__(self, deployment: Deployment, service: ServiceProcess) -> None:
        self._deployment = deployment
        self._service = service
        self.reason = ""
        self.promoted = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def strike(self) -> None:
        self._deployment.primary.kill()
        self._thread.start()

    def _watch(self) -> None:
        deadline = time.monotonic() + NOT_READY_S
        while "name no primary" not in self.reason and time.monotonic() < deadline:
            status, text = readiness(self._service)
            self.reason = text if status == 503 else ""
        asyncio.run(self._deployment.promoted())
        self.promoted.set()

    def come_back(self) -> None:
        assert self.promoted.wait(30)
        self._thread.join(30)
        asyncio.run(self._deployment.primary_back())


@pytest.mark.timeout(180)
def test_a_training_loop_goes_on_over_a_failover_and_trains_on_every_group_once(tmp_path: Path) -> None:
    policy = Policy(
        batch_groups=BATCH,
        max_queued_groups=4 * BATCH,
        overflow_action="block",
        lease_ttl_ms=5_000,
        wait_replicas=1,
        wait_timeout_ms=500,
    )
    options = SessionOptions(pull_timeout_s=90, max_pending_tasks=8, chunk_tasks=4)
    trained: list[str] = []
    with (
        sentinels() as deployment,
        running_service(tmp_path, store=deployment.url, rpc_processes=2) as service,
        BufferClient(service.address, ClientOptions(timeout_s=90)) as client,
    ):
        failover = Failover(deployment, service)
        assert readiness(service) == (200, "ok\n")
        with (
            PushingWorker(service.address, "r", patience_s=90) as worker,
            client.session("r", policy=policy, tasks=tasks(), prefetch=1, options=options) as session,
        ):
            for batch in session:
                trained += [group.task_id for group in batch.groups]
                if batch.step == KILL_AT:
                    failover.strike()
                    failover.come_back()
                session.publish()
        assert "its Sentinels name no primary that works" in failover.reason
        run = client.run("r")
        assert readiness(service) == (200, "ok\n")
    assert len(trained) == len(set(trained)) == STEPS * BATCH
    assert set(worker.acknowledged) <= set(trained)
    assert run.ledger.balanced
    assert (run.ledger.groups.accepted.groups, run.ledger.groups.trained.groups) == (STEPS * BATCH, STEPS * BATCH)
    assert (run.committed_steps, run.paused) == (STEPS, "")
