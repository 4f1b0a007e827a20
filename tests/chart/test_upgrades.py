"""Tests of upgrades from the last release, and back: replicas of two versions share a store, and runs go on. Who does
not know a layout stays away from it, or ends where it was there before.

The last release is its wheel, as scripts/released.sh has built it.
"""

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import redis

from buffer_cli.calls import Calls, calling
from buffer_cli.options import CallOptions
from buffer_service.store.keys import ALONE, SCHEMA_VERSION, index_key
from buffer_wire.connection.retry import rpc_error
from buffer_wire.errors import LayoutChanged
from rollout_buffer.v1 import common_pb2, runs_pb2, runs_pb2_grpc
from tests.chart.helm import ROOT, missing
from tests.e2e.test_worker_engine import until
from tests.support.service import RELEASED, ServiceProcess, release_is_there, running_service
from tests.support.store_server import StoreServer
from tests.workers.process import worker_process
from trainer_client import BufferClient, ClientOptions, Environment, Policy, SamplingParams, SessionOptions, Task

pytestmark = pytest.mark.timeout(300)
"""Services are started one after the other, each of several processes."""

BATCH, STEPS = 2, 12

NEXT = f"""
import sys
from buffer_service.store import suitability
suitability.SCHEMA_VERSION = {SCHEMA_VERSION + 1}
from buffer_cli.main import app
app(["serve", "--store", sys.argv[1], "--data-dir", sys.argv[2], "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"])
"""
"""A service of a version to come, with another layout of keys."""


@pytest.fixture
def store() -> Iterator[StoreServer]:
    with StoreServer() as server:
        yield server


@contextlib.contextmanager
def _calls(service: ServiceProcess) -> Iterator[Calls]:
    with calling(Calls, CallOptions(address=service.address, timeout_s=30.0)) as calls:
        yield calls


@pytest.fixture
def released() -> Path:
    """Return what the wheel of the last release holds."""
    if not release_is_there():
        history = subprocess.run(
            ["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if history.stdout.strip() != "false":
            pytest.skip("the history that is here does not reach the last release")
        missing(f"{RELEASED.relative_to(ROOT)} is missing: `make chart` builds it")
    return RELEASED


def _worker_of(code: Path, folder: Path) -> tuple[str, ...]:
    """The program of a worker of another version, whose rewards lie in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rewards.py").write_text("def score(sample):\n    return float(sample.sample_index)\n")
    return ("env", f"PYTHONPATH={code}{os.pathsep}{folder}", sys.executable, "-P", "-m", "buffer_cli", "worker")


def _end(service: ServiceProcess) -> None:
    """Kill a service that was started."""
    if service.process is not None:
        service.kill()


def _contents(client: redis.Redis) -> dict[bytes, bytes | None]:
    """Everything on the store, as it would be restored."""
    return {key: client.dump(key) for key in client.scan_iter()}


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_a_training_loop_goes_on_over_an_upgrade_and_a_rollback(
    store: StoreServer, released: Path, tmp_path: Path
) -> None:
    settings = {"rpc_processes": 1, "drain_grace_s": 5, "store": store.url}
    old = ServiceProcess(tmp_path / "old", settings, code=released)
    new = ServiceProcess(tmp_path / "new", settings)
    old.listen, new.listen = _free_address(), _free_address()
    tasks = (
        Task(task_id=f"t{i}", group_size=2, sampling=SamplingParams(max_new_tokens=8), prompt_token_ids=[1, 2])
        for i in range(BATCH * STEPS)
    )
    policy = Policy(batch_groups=BATCH, overflow_action="block", lease_ttl_ms=5_000)
    options = SessionOptions(pull_timeout_s=120, max_pending_tasks=6, chunk_tasks=2)
    trained: list[str] = []
    with contextlib.ExitStack() as stack:
        for service in (old, new):
            service.start()
            stack.callback(service.kill)
        # Each goes to its first address for as long as that answers: the worker is ahead of the trainer.
        trainer = BufferClient(f"ipv4:{old.address},{new.address}", ClientOptions(timeout_s=120))
        stack.enter_context(trainer)
        flags = ("--simulate", "--engines", "2", "--reward", "rewards:score")
        program = _worker_of(released, tmp_path / "worker")
        addresses = f"ipv4:{new.address},{old.address}"
        stack.enter_context(worker_process(addresses, "r", tmp_path / "worker", *flags, program=program))
        session = stack.enter_context(trainer.session("r", policy=policy, tasks=tasks, options=options))
        for batch in session:
            trained += [group.task_id for group in batch.groups]
            if batch.step == STEPS // 3:
                assert old.metric("rollout_buffer_rpc_seconds_count", method="PullBatch") > 0
                assert new.metric("rollout_buffer_rpc_seconds_count", method="LeaseTasks") > 0
                assert old.stop() == 0  # the upgrade
            if batch.step == 2 * STEPS // 3:
                old.start()  # the rollback
                assert new.stop() == 0
            session.publish()
        run = session.state()
        # Its counts began anew with the rollback.
        assert old.metric("rollout_buffer_rpc_seconds_count", method="PullBatch") > 0
    assert len(trained) == len(set(trained)) == BATCH * STEPS
    assert run.ledger.balanced
    assert (run.ledger.groups.accepted.groups, run.ledger.groups.trained.groups) == (BATCH * STEPS, BATCH * STEPS)
    assert (run.committed_steps, run.published.version, run.paused) == (STEPS, STEPS, "")


def test_a_run_of_the_last_release_goes_on_with_what_it_had_until_it_has_what_that_does_not_know(
    released: Path, tmp_path: Path
) -> None:
    settings = {"rpc_processes": 1, "drain_grace_s": 5}
    old = ServiceProcess(tmp_path / "data", settings, code=released)
    new = ServiceProcess(tmp_path / "data", settings)
    tasks = [
        Task(task_id=f"t{i}", group_size=2, sampling=SamplingParams(max_new_tokens=8), prompt_token_ids=[1, 2])
        for i in range(BATCH * STEPS)
    ]
    policy = Policy(batch_groups=BATCH, max_queued_groups=2 * BATCH, overflow_action="block", lease_ttl_ms=5_000)
    options = SessionOptions(pull_timeout_s=120, max_pending_tasks=6, chunk_tasks=2)
    flags = ("--simulate", "--engines", "2", "--reward", "rewards:score")
    trained: list[str] = []
    with contextlib.ExitStack() as stack:
        for service in (old, new):
            stack.callback(_end, service)
        old.start()
        new.listen = old.address
        client = stack.enter_context(BufferClient(old.address, ClientOptions(timeout_s=60)))
        program = _worker_of(released, tmp_path / "old")
        with (
            worker_process(old.address, "r", tmp_path / "old", *flags, program=program) as worker,
            client.session("r", policy=policy, tasks=tasks, options=options) as session,
        ):
            trained += [group.task_id for group in next(session).groups]
            session.publish()
            delivered = next(session)
            until(lambda: client.ledger("r").groups.queued.groups == 2 * BATCH, "the queue is full", 60)
            until(lambda: client.ledger("r").tasks.leased > 0, "a group is in flight", 60)
            worker.kill()
            before = client.ledger("r")
            old.kill()
        # The upgrade: everything was killed at once, and the store's files are where they were.
        new.start()
        assert client.ledger("r") == before
        with (
            worker_process(new.address, "r", tmp_path / "new", "--simulate", "--engines", "2"),
            client.session("r", tasks=tasks, options=options) as session,
        ):
            again = next(session)
            assert [group.group_id for group in again.groups] == [group.group_id for group in delivered.groups]
            assert [sample.token_ids.tobytes() for sample in again.samples] == [
                sample.token_ids.tobytes() for sample in delivered.samples
            ]
            for batch in itertools.chain([again], session):
                trained += [group.task_id for group in batch.groups]
                session.publish()
        assert sorted(trained) == sorted(task.task_id for task in tasks)
        assert client.ledger("r").balanced

        # A rollback: the release takes its run back, until the run has what the release would damage.
        assert new.stop() == 0
        old.listen = new.address
        old.start()
        assert client.ledger("r").groups.trained.groups == len(tasks)
        assert old.stop() == 0
        new.start()
        client.update_policy("r", environments={"code": Environment(starts_per_minute=60)})
        marked = client.run("r")
        assert new.stop() == 0
        old.start()
        hurried = stack.enter_context(BufferClient(old.address, ClientOptions(timeout_s=2)))
        with pytest.raises(LayoutChanged, match=f"version {SCHEMA_VERSION}p"):
            hurried.run("r")
        old.kill()
        new.start()
        assert client.run("r").policy == marked.policy
        assert client.ledger("r") == marked.ledger


def test_a_service_whose_store_is_taken_over_writes_nothing_more_and_ends(store: StoreServer, tmp_path: Path) -> None:
    with running_service(tmp_path / "old", store=store.url) as old, _calls(old) as calls:
        calls.call(calls.runs.CreateRun, runs_pb2.CreateRunRequest(run_id="math"))
        with redis.Redis(unix_socket_path=str(store.socket)) as taker, grpc.insecure_channel(old.address) as channel:
            # As a version does that brings the store to its own layout.
            taker.hset(index_key("math", "run"), "layout", SCHEMA_VERSION + 1)
            taken = _contents(taker)
            pause = runs_pb2.PauseRunRequest(run=common_pb2.RunRef(run_id="math"))
            with pytest.raises(grpc.RpcError) as refused:
                runs_pb2_grpc.RunServiceStub(channel).PauseRun(pause, timeout=30)
            error = rpc_error(refused.value)
            assert isinstance(error, LayoutChanged)
            assert error.retryable, "clients repeat it, and reach another replica when this one has ended"
            assert _contents(taker) == taken
            taker.set(ALONE.schema, SCHEMA_VERSION + 1)
            taken = _contents(taker)
            assert old.process is not None
            assert old.process.wait(60) == 1
            assert _contents(taker) == taken
        assert f"is version {SCHEMA_VERSION + 1} by now and this service" in old.log.read_text()


def test_a_service_with_another_layout_refuses_and_the_one_that_is_there_goes_on(
    store: StoreServer, tmp_path: Path
) -> None:
    with running_service(tmp_path / "old", store=store.url) as old, _calls(old) as calls:
        calls.call(calls.runs.CreateRun, runs_pb2.CreateRunRequest(run_id="math"))

        environment = {name: value for name, value in os.environ.items() if not name.startswith("RB_")}
        command = [sys.executable, "-c", NEXT, store.url, str(tmp_path / "next")]
        refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)

        assert refused.returncode == 1
        known = f"is version {SCHEMA_VERSION}; this service knows version {SCHEMA_VERSION + 1}"
        assert known in refused.stdout + refused.stderr
        assert calls.list() == ["math"]
        with urllib.request.urlopen(f"{old.admin}/readyz", timeout=20) as answer:
            assert answer.status == 200
