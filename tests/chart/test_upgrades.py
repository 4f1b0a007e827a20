"""What a rolling upgrade relies on: replicas share a store, and one that does not know its layout stays away."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from buffer_cli.calls import RunCalls
from buffer_service.store.keys import SCHEMA_VERSION
from rollout_buffer.v1 import runs_pb2
from tests.support.service import ServiceProcess, running_service
from tests.support.store_server import StoreServer

pytestmark = pytest.mark.timeout(300)
"""Services are started one after the other, each of several processes."""

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
def _calls(service: ServiceProcess) -> Iterator[RunCalls]:
    with grpc.insecure_channel(service.address) as channel:
        yield RunCalls(channel, service.address, timeout_s=30.0)


def test_a_run_goes_on_at_the_new_replica_when_the_old_one_ends(store: StoreServer, tmp_path: Path) -> None:
    with running_service(tmp_path / "old", store=store.url) as old:
        with _calls(old) as calls:
            calls.create("math", runs_pb2.RunPolicy())
        with running_service(tmp_path / "new", store=store.url) as new, _calls(new) as calls:
            assert calls.list() == ["math"]
            assert old.stop() == 0
            assert calls.get("math").run.run_id == "math"


def test_a_service_with_another_layout_refuses_and_the_one_that_is_there_goes_on(
    store: StoreServer, tmp_path: Path
) -> None:
    with running_service(tmp_path / "old", store=store.url) as old, _calls(old) as calls:
        calls.create("math", runs_pb2.RunPolicy())

        environment = {name: value for name, value in os.environ.items() if not name.startswith("RB_")}
        command = [sys.executable, "-c", NEXT, store.url, str(tmp_path / "next")]
        refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)

        assert refused.returncode == 1
        known = f"is version {SCHEMA_VERSION}; this service knows version {SCHEMA_VERSION + 1}"
        assert known in refused.stdout + refused.stderr
        assert calls.list() == ["math"]
