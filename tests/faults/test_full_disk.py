"""A service whose disk is full: it refuses writes by name, serves what is there, bears kills, and goes on by itself."""

import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc
import pytest

from buffer_service.supervisor.disk import LARGEST_SHARE
from rollout_buffer.v1 import groups_pb2
from tests.support.processes import children, command
from tests.support.rpc import RunRpc, connect, failure_of, make_group
from tests.support.service import ServiceProcess, running_service
from tests.support.small_disk import SmallDisk, small_disk

pytestmark = pytest.mark.faults

T = TypeVar("T")

DEADLINE_S = 60.0
OUT_OF_DISK = "store_out_of_disk"
QUEUED, DUPLICATE = groups_pb2.PUSH_OUTCOME_QUEUED, groups_pb2.PUSH_OUTCOME_DUPLICATE


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk") as mounted:
        yield mounted


@pytest.fixture(params=["process", "host"])
def service(request: pytest.FixtureRequest, disk: SmallDisk) -> Iterator[ServiceProcess]:
    """Its data and its log are on the small disk."""
    with running_service(disk.path, durability=request.param, rpc_processes=2, drain_grace_s=1) as running:
        yield running


def eventually(call: Callable[[], T]) -> T:
    """Return what the call returns once it does; what fails meanwhile may be tried again."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return call()
        except grpc.RpcError as error:
            failed = failure_of(error)
            assert failed.retryable, failed
            assert time.monotonic() < deadline, failed
            time.sleep(0.05)


def kill(service: ServiceProcess, program: str) -> None:
    """kill -9 of the children that run it."""
    for pid in children(service.pid):
        if program in command(pid):
            os.kill(pid, signal.SIGKILL)


def push_until_refused(run: RunRpc, prefix: str) -> list[groups_pb2.Group]:
    """Push until the disk is said to be full; the groups that were acknowledged."""
    acknowledged: list[groups_pb2.Group] = []
    deadline = time.monotonic() + DEADLINE_S
    reason = ""
    while reason != OUT_OF_DISK:
        assert time.monotonic() < deadline, reason
        group = make_group(f"{prefix}{len(acknowledged)}")
        try:
            if run.push_one(group).outcome in (QUEUED, DUPLICATE):
                acknowledged.append(group)
        except grpc.RpcError as error:
            failed = failure_of(error)
            assert failed.retryable, failed
            reason = failed.reason
    return acknowledged


def looks(service: ServiceProcess, run: RunRpc) -> None:
    """Everything that needs no write."""
    assert eventually(run.get).paused == ""
    for path in ("/", "/api/runs", f"/api/runs/{run.run_id}", "/metrics"):
        with urllib.request.urlopen(f"{service.admin}{path}", timeout=20) as answer:
            assert answer.status == 200
    assert service.metric("rollout_buffer_store_up") == 1
    assert service.metric("rollout_buffer_revision", run=run.run_id) > 0


def test_what_is_there_is_served_what_is_new_is_refused_and_nothing_acknowledged_is_lost(
    service: ServiceProcess, disk: SmallDisk
) -> None:
    rpc = connect(service.address)
    with rpc.channel:
        run = rpc.create(batch_groups=2, max_queued_groups=10_000)
        acknowledged = run.fill(4)
        _, delivered = run.pull(0)
        # Nearly full is full, so that reading needs no luck.
        disk.fill(left=disk.size() // LARGEST_SHARE // 2)
        acknowledged += push_until_refused(run, "before")
        looks(service, run)
        _, groups = eventually(lambda: run.pull(0))
        assert groups == delivered

        disk.fill()
        # Its own log has no room either.
        kill(service, "buffer_service.app")
        looks(service, run)
        acknowledged += push_until_refused(run, "full")
        kill(service, "valkey-server")
        looks(service, run)
        acknowledged += push_until_refused(run, "after")
        looks(service, run)
        disk.free()
        assert eventually(lambda: run.push_one(make_group("room"))).outcome == QUEUED
        found = [eventually(partial(run.push_one, group)).outcome for group in acknowledged]
        assert found == [DUPLICATE] * len(acknowledged)
        assert eventually(run.get).paused == ""
    service.stop()
    left = {str(file.relative_to(service.data_dir)) for file in service.data_dir.rglob("*") if file.is_file()}
    ours = {"service.lock", "store/lock", "store/store.log"}
    assert {name for name in left if not name.startswith("store/appendonlydir/")} == ours
