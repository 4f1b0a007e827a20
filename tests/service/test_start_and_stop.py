"""A start that takes long, or fails: signals end it, probes are answered, and what passes is waited out."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from buffer_service.app.assignment import Assignment
from buffer_service.observability.shared_values import SharedMetrics
from buffer_service.settings import Settings
from buffer_service.store.embedded.server import EmbeddedStore
from buffer_service.supervisor import rpc_processes
from buffer_service.supervisor.rpc_processes import RpcProcesses, StartFailed
from buffer_service.supervisor.stopping import Stopped, unless
from buffer_wire.errors import StoreUnavailable

SOON_S = 60.0
"""Long enough for a slow machine; what is waited for comes, or never."""

LOADING = f"""#!{sys.executable}
import pathlib, socket, sys
path = sys.argv[sys.argv.index("--unixsocket") + 1]
server = socket.socket(socket.AF_UNIX)
server.bind(path)
server.listen()
while True:
    peer, _ = server.accept()
    peer.recv(100)
    peer.sendall(b"-LOADING the dataset is in memory soon\\r\\n")
    peer.close()
    (pathlib.Path(path).parent / "asked").touch()
"""
"""A store that never gets ready."""


def until(path: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until the file is there."""
    deadline = time.monotonic() + SOON_S
    while not path.exists():
        assert process.poll() is None, "the service has ended"
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.02)


def answer(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=SOON_S) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as refusal:
        return refusal.code, refusal.read().decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_start_that_waits_for_the_store_and_probes_are_answered_meanwhile(
    tmp_path: Path, number: signal.Signals
) -> None:
    binary = tmp_path / "loading-server"
    binary.write_text(LOADING)
    binary.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as free:
        admin = f"127.0.0.1:{free.getsockname()[1]}"
    flags = ["--listen", "127.0.0.1:0", "--admin", admin, "--data-dir", f"{tmp_path / 'data'}"]
    command = [sys.executable, "-m", "buffer_cli", "serve", *flags, "--store-binary", f"{binary}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RB_")}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        until(tmp_path / "data" / "store" / "asked", process)
        assert answer(f"http://{admin}/livez") == (200, "ok\n")
        assert answer(f"http://{admin}/readyz") == (503, "the service is starting\n")
        process.send_signal(number)
        assert process.wait(SOON_S) == 0
    finally:
        process.kill()
        process.wait()
    written = (tmp_path / "log").read_text()
    assert "stopped before it served" in written
    assert "Traceback" not in written
    assert not (tmp_path / "data" / "store" / "store.sock").exists()


async def test_what_is_cut_short_has_ended_when_the_stop_is_told() -> None:
    stop, ended = asyncio.Event(), []

    async def work() -> None:
        try:
            stop.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    with pytest.raises(Stopped):
        await asyncio.wait_for(unless(stop, work()), SOON_S)
    assert ended == ["cleaned up"]


async def test_what_is_done_in_time_is_had() -> None:
    async def work() -> int:
        return 7

    assert await unless(asyncio.Event(), work()) == 7


# ── processes that cannot be made ────────────────────────────────────────────

CHILD = "print('ready', flush=True); import signal; signal.pause()"
"""Program that stands for an rpc process before its supervisor."""


@pytest.fixture
def processes(tmp_path: Path) -> RpcProcesses:
    settings = Settings(data_dir=tmp_path).for_rpc()
    return RpcProcesses(Assignment(os.getpid(), "127.0.0.1:1", "redis://nowhere", settings), SharedMetrics(1))


class Spawning:
    """create_subprocess_exec that makes the stand-in; it fails, or its child says nothing, while it is told so."""

    def __init__(self) -> None:
        self.failures = 0
        self.silent = False
        self.asked = asyncio.Event()
        self._spawn = asyncio.create_subprocess_exec

    async def __call__(self, *_: Any, **options: Any) -> asyncio.subprocess.Process:
        self.asked.set()
        if self.failures:
            self.failures -= 1
            raise BlockingIOError(11, "Resource temporarily unavailable")
        program = CHILD.partition("; ")[2] if self.silent else CHILD
        return await self._spawn(sys.executable, "-c", program, **options)


@pytest.fixture
def spawning(monkeypatch: pytest.MonkeyPatch) -> Spawning:
    spawning = Spawning()
    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawning)
    monkeypatch.setattr(rpc_processes, "FIRST_BACKOFF_S", 0.01)
    return spawning


async def until_up(processes: RpcProcesses, not_pid: int) -> None:
    async with asyncio.timeout(SOON_S):
        while not processes.all_up or not_pid in processes.pids:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.02)


async def test_a_process_that_could_not_be_made_is_made_after_the_back_off(
    processes: RpcProcesses, spawning: Spawning
) -> None:
    await processes.start()
    (first,) = processes.pids
    spawning.failures = 2
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(processes.keep_running())
        os.kill(first, signal.SIGKILL)
        await until_up(processes, first)
        await processes.drain(0.0)
    assert spawning.failures == 0


async def test_a_first_start_that_fails_is_told_and_leaves_no_process(
    processes: RpcProcesses, spawning: Spawning
) -> None:
    spawning.failures = 1
    with pytest.raises(StartFailed, match=r"cannot be made: .*Resource temporarily unavailable"):
        await processes.start()
    assert processes.pids == []


async def test_a_drain_cuts_short_the_start_of_a_process_that_says_nothing(
    processes: RpcProcesses, spawning: Spawning
) -> None:
    await processes.start()
    (first,) = processes.pids
    spawning.silent = True
    spawning.asked.clear()
    keeping = asyncio.ensure_future(processes.keep_running())
    os.kill(first, signal.SIGKILL)
    await asyncio.wait_for(spawning.asked.wait(), SOON_S)
    await processes.drain(0.0)
    began = time.monotonic()
    await asyncio.wait_for(keeping, SOON_S)
    assert time.monotonic() - began < rpc_processes.START_TIMEOUT_S / 2
    assert processes.pids == []


async def test_a_store_that_cannot_be_made_is_unavailable(tmp_path: Path, spawning: Spawning) -> None:
    spawning.failures = 1
    with pytest.raises(StoreUnavailable, match=r"cannot be started: .*Resource temporarily unavailable"):
        await EmbeddedStore(tmp_path).start()
