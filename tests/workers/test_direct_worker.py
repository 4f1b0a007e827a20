"""Worker processes that write their groups to the store of a real service, and lose it, or die, on the way."""

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from buffer_wire.payloads.keys import key_prefix
from tests.support.door import Door
from tests.support.sentinels import free_port
from tests.support.service import ServiceProcess, running_service
from tests.support.store_server import StoreServer, store_server
from tests.workers.process import worker_process
from tests.workers.training import OPTIONS, endless, seen_once
from trainer_client import BufferClient, Policy

TOKENS = 2_500
"""Tokens of a sample; four of them take 90 KB, which goes directly."""
BATCH_BYTES = 4 * 4 * TOKENS * 9
LARGE = (
    "--simulate", "--tokens-per-s", "20000", "--length-median", str(TOKENS), "--length-sigma", "0",
    "--groups-per-engine", "4", "--lease-wait-s", "1",
)  # fmt: skip
PORT = free_port()
POLICY = Policy(batch_groups=4, max_queued_groups=8, overflow_action="block")


@pytest.fixture(scope="module")
def store() -> Iterator[StoreServer]:
    with store_server("--port", str(PORT), "--bind", "127.0.0.1") as running:
        yield running


@pytest.fixture(scope="module")
def door(store: StoreServer) -> Iterator[Door]:
    """The way of workers and trainers to the store; the service has its own."""
    with Door(store.socket) as made:
        yield made


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, door: Door) -> Iterator[ServiceProcess]:
    way = {"store": f"redis://127.0.0.1:{PORT}", "payload_address": f"127.0.0.1:{door.port}"}
    with running_service(tmp_path_factory.mktemp("service"), **way) as running:
        yield running


class Pushed:
    """Bytes of pushes since it was made: those that passed the service by, and those that it received."""

    def __init__(self, service: ServiceProcess) -> None:
        self._service = service
        self._before = self._now()

    def _now(self) -> tuple[float, float]:
        return (
            self._service.metric("rollout_buffer_direct_bytes_total", method="PushGroups"),
            self._service.metric("rollout_buffer_rpc_received_bytes_total", method="PushGroups"),
        )

    @property
    def direct(self) -> float:
        return self._now()[0] - self._before[0]

    @property
    def received(self) -> float:
        return self._now()[1] - self._before[1]


def test_groups_pass_the_service_by_and_are_relayed_while_the_store_is_not_to_be_reached(
    service: ServiceProcess, client: BufferClient, run_id: str, door: Door, tmp_path: Path
) -> None:
    seen: set[str] = set()
    with (
        worker_process(service.address, run_id, tmp_path, *LARGE) as worker,
        client.session(run_id, policy=POLICY, tasks=endless(TOKENS), options=OPTIONS) as session,
    ):

        def train(batches: int) -> None:
            for batch in itertools.islice(session, batches):
                seen_once(seen, [group.task_id for group in batch.groups])
                assert all(sample.tokens == TOKENS + sample.prompt_len for sample in batch.samples)

        pushed = Pushed(service)
        train(4)
        assert pushed.direct > 4 * BATCH_BYTES
        assert pushed.received < pushed.direct / 10
        door.close()
        pushed = Pushed(service)
        # More than what was written before.
        train(8)
        assert pushed.received > 2 * BATCH_BYTES
        assert f"w, writing for run {run_id}, has payloads relayed by the service" in worker.said()
        assert service.metric("rollout_buffer_relaying_clients", run=run_id, of="pushes") == 1
        door.open()
        pushed = Pushed(service)
        while not pushed.direct or service.metric("rollout_buffer_relaying_clients", run=run_id):
            train(1)
        assert f"w, writing for run {run_id}, moves payloads directly again" in worker.said()
        assert worker.stop() == 0
    ledger = client.run(run_id).ledger
    assert ledger.groups.balanced
    assert ledger.tasks.balanced
    assert ledger.tasks.failed == 0


def test_results_of_evaluations_pass_the_service_by_too(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    pushed = Pushed(service)
    with (
        worker_process(service.address, run_id, tmp_path, *LARGE) as worker,
        client.session(run_id, policy=POLICY, tasks=iter(()), options=OPTIONS) as session,
    ):
        evaluated = list(itertools.islice(endless(TOKENS), 4))
        results = list(session.evaluate(evaluated).groups(60))
        assert [group.samples[0].tokens - group.samples[0].prompt_len for group in results] == [TOKENS] * 4
        assert worker.stop() == 0
    assert pushed.direct > BATCH_BYTES > pushed.received


def test_a_worker_without_direct_payloads_has_all_of_them_relayed(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    pushed = Pushed(service)
    with (
        worker_process(service.address, run_id, tmp_path, *LARGE, "--no-direct-payloads") as worker,
        client.session(run_id, policy=POLICY, tasks=itertools.islice(endless(TOKENS), 4), options=OPTIONS) as session,
    ):
        assert len(next(session).groups) == 4
        assert worker.stop() == 0
    assert pushed.direct == 0
    assert pushed.received > BATCH_BYTES


def test_a_worker_that_dies_between_write_and_push_leaves_nothing_but_what_expires(
    service: ServiceProcess, client: BufferClient, run_id: str, store: StoreServer, tmp_path: Path
) -> None:
    keeper: Any = redis.Redis(unix_socket_path=str(store.socket))
    tasks = itertools.islice(endless(TOKENS), 4)
    with (
        contextlib.closing(keeper),
        client.session(run_id, policy=POLICY, tasks=tasks, options=OPTIONS) as session,
    ):
        dying = [sys.executable, "-m", "tests.workers.dying_writer", service.address, run_id, str(tmp_path / "dying")]
        assert subprocess.run(dying, check=False, timeout=60).returncode == -9
        (left,) = keeper.keys(f"{key_prefix(run_id)}*")
        assert 0 < keeper.pttl(left) <= 600_000
        assert client.run(run_id).ledger.groups.accepted.groups == 0
        with worker_process(service.address, run_id, tmp_path, *LARGE) as worker:
            assert {group.task_id for group in next(session).groups} == {f"t{i:05d}" for i in range(4)}
            assert worker.stop() == 0
        assert 0 < keeper.pttl(left) <= 600_000
    ledger = client.run(run_id).ledger
    assert ledger.groups.balanced
    assert ledger.tasks.balanced
