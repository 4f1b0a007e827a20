"""Tests of what a rolling upgrade relies on: replicas of two versions share a store, and one that does not know its
layout stays away, or ends where it was there before.
"""

import contextlib
import os
import shutil
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
from tests.chart.helm import ROOT
from tests.support.service import ServiceProcess, running_service
from tests.support.store_server import StoreServer
from tests.workers.process import worker_process
from trainer_client import BufferClient, ClientOptions, Policy, SamplingParams, SessionOptions, Task

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


def _older(folder: Path) -> Path:
    """The code of another version with the same layout: all of its scripts are others to the store."""
    shutil.copytree(ROOT / "buffer_service", folder / "buffer_service", ignore=shutil.ignore_patterns("__pycache__"))
    for script in (folder / "buffer_service/store/lua").glob("*/*.lua"):
        script.write_text(script.read_text() + "\n-- As it was in the version before.\n")
    return folder


def _contents(client: redis.Redis) -> dict[bytes, bytes | None]:
    """Everything on the store, as it would be restored."""
    return {key: client.dump(key) for key in client.scan_iter()}


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_a_training_loop_goes_on_over_an_upgrade_and_a_rollback(store: StoreServer, tmp_path: Path) -> None:
    settings = {"rpc_processes": 1, "drain_grace_s": 5, "store": store.url}
    old = ServiceProcess(tmp_path / "old", settings, code=_older(tmp_path / "older"))
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
        stack.enter_context(
            worker_process(
                f"ipv4:{new.address},{old.address}", "r", tmp_path / "worker", "--simulate", "--engines", "2"
            )
        )
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
