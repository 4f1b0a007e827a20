"""Tests of how a worker process ends: signals and exit codes. No service is there, but for a fake one where it needs
work.
"""

import asyncio
import time
from pathlib import Path

from rollout_workers.main import EXIT_ENGINES, EXIT_OK, EXIT_OPTIONS, EXIT_SERVICE
from tests.workers.building import eventually, task
from tests.workers.fake_service import FakeService
from tests.workers.process import WorkerProcess, worker_process

NOWHERE = "127.0.0.1:9"


def until_said(worker: WorkerProcess, text: str) -> None:
    deadline = time.monotonic() + 30
    while text not in worker.said():
        assert time.monotonic() < deadline, worker.said()
        assert worker.process.poll() is None, worker.said()
        time.sleep(0.05)


def test_first_signal_drains(tmp_path: Path) -> None:
    with worker_process(NOWHERE, "r", tmp_path, "--simulate", "--drain-grace-s", "3") as worker:
        until_said(worker, "waiting_on='the service at 127.0.0.1:9'")
        assert worker.stop() == EXIT_OK
    assert "draining" in worker.said()


async def test_reward_that_hangs_does_not_keep_the_process(fake: FakeService, tmp_path: Path) -> None:
    flags = ("--simulate", "--drain-grace-s", "2", "--reward", "tests.workers.reward_functions:hanging")
    await fake.submit(task("t1", group_size=1))
    with worker_process(fake.address, "r", tmp_path, *flags) as worker:
        await eventually(lambda: "the reward function hangs" in worker.said(), timeout_s=30.0)
        assert await asyncio.to_thread(worker.stop) == EXIT_OK
    assert "worker ends" in worker.said()
    assert [r.lease_id for r in fake.returns] == ["t1/0/1"]


def test_signal_before_the_engines_are_there_ends_at_once(tmp_path: Path) -> None:
    with worker_process(NOWHERE, "r", tmp_path, "--engine", "http://127.0.0.1:9") as worker:
        until_said(worker, "worker starts")
        began = time.monotonic()
        assert worker.stop() == EXIT_OK
    assert time.monotonic() - began < 10


def test_reward_that_cannot_be_imported(tmp_path: Path) -> None:
    with worker_process(NOWHERE, "r", tmp_path, "--simulate", "--reward", "no.such:thing") as worker:
        assert worker.process.wait(30) == EXIT_OPTIONS
    assert "module:function that can be imported" in worker.said()


def test_service_that_is_not_there(tmp_path: Path) -> None:
    with worker_process(NOWHERE, "r", tmp_path, "--simulate", "--service-timeout-s", "1") as worker:
        assert worker.process.wait(30) == EXIT_SERVICE
    assert "waiting on the service at 127.0.0.1:9" in worker.said()


def test_engine_that_does_not_start(tmp_path: Path) -> None:
    flags = ("--launch", str(tmp_path), "--sglang-python", str(tmp_path / "no-python"))
    with worker_process(NOWHERE, "r", tmp_path, *flags) as worker:
        assert worker.process.wait(30) == EXIT_ENGINES
    assert "install SGLang there first" in worker.said()
