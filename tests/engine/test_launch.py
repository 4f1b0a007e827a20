"""SglangLauncher with a fake sglang package in an environment of its own: processes, ports, deadlines, logs."""

import ast
import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from buffer_wire.errors import InvalidField
from rollout_workers.engine.errors import EngineNotStarted
from rollout_workers.engine.options import LaunchOptions
from rollout_workers.engine.sglang import launch
from rollout_workers.engine.sglang.hosts import own_hosts
from rollout_workers.engine.sglang.launch import SglangLauncher, free_port
from rollout_workers.engine.sglang.server import SglangServerOptions
from rollout_workers.options import WorkerOptions

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter whose `sglang` is the fake."""
    venv = tmp_path_factory.mktemp("fake-sglang")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "sglang").mkdir()
    (site / "sglang" / "__init__.py").touch()
    shutil.copy(Path(__file__).with_name("fake_sglang_package.py"), site / "sglang" / "launch_server.py")
    return venv / "bin" / "python"


def options(python: Path, log: Path, **changes: Any) -> SglangServerOptions:
    values = {"python": python, "model_path": Path("/models/tiny"), "log_path": log / "sglang.log"}
    return SglangServerOptions(**{**values, "ready_timeout_s": 20.0, "stop_grace_s": 5.0, **changes})


def group_members(pgid: int) -> list[str]:
    """Command lines of the living processes of a process group."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, _, pgrp = (process / "stat").read_text().rsplit(")", 1)[1].split()[:3]
            if int(pgrp) == pgid and state != "Z":
                found.append((process / "cmdline").read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def wait_until_gone(pgid: int, within_s: float = 10) -> None:
    end = time.monotonic() + within_s
    while members := group_members(pgid):
        assert time.monotonic() < end, members
        time.sleep(0.02)


async def test_a_server_is_started_found_ready_and_ended_with_its_children(python: Path, tmp_path: Path) -> None:
    async with SglangLauncher(options(python, tmp_path)) as launcher:
        pid = launcher.pid
        assert pid is not None
        assert launcher.returncode is None
        assert len(group_members(pid)) == 2
        assert os.getpgid(pid) == pid != os.getpgid(0)
        port = int(launcher.base_url.rsplit(":", 1)[1])
        assert 20_000 <= port < 32_000
    wait_until_gone(pid)


async def test_the_command_line_and_the_environment_are_those_that_sglang_needs_on_a_cpu(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    flags = ("--mem-fraction-static", "0.5")
    async with SglangLauncher(
        options(python, tmp_path, dtype="float32", weight_version="3.7", extra_flags=flags)
    ) as it:
        printed, environment = it.log_tail().splitlines()[:2]
    for flag in (
        "--host 127.0.0.1",
        "--model-path /models/tiny",
        "--weight-version 3.7",
        "--dtype float32",
        "--attention-backend torch_native",
        "--sampling-backend pytorch",
        "--disable-overlap-schedule",
        "--incremental-streaming-output",
        "--sleep-on-idle",
        "--max-total-tokens 65536",
    ):
        assert flag in printed
    assert printed.endswith("--mem-fraction-static 0.5")
    assert "SGLANG_USE_CPU_ENGINE" in environment
    assert "TORCHDYNAMO_DISABLE" in environment
    assert "OMP_NUM_THREADS" in environment
    assert "PYTHONPATH" not in environment
    assert "PYTHONDONTWRITEBYTECODE" not in environment


def environment(printed: str) -> dict[str, str]:
    values = ast.literal_eval(printed.partition(": ")[2])
    assert isinstance(values, dict)
    return values


async def test_on_a_gpu_sglang_has_its_own_defaults_and_the_gpus_that_it_is_given(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last one is set by torch, where another test has imported its compiler.
    ours = (
        "OMP_NUM_THREADS",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "SGLANG_USE_CPU_ENGINE",
        "SGLANG_VLM_CACHE_SIZE_MB",
    )
    for name in (*ours, "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    given_gpus = options(python, tmp_path, device="cuda", gpus=["2", "3"], extra_flags=("--tp", "2"))
    async with SglangLauncher(given_gpus) as it:
        printed, given = it.log_tail().splitlines()[:2]
    arguments = printed.split(" ", 2)[2].split()
    assert {argument for argument in arguments if argument.startswith("--")} == {
        *("--host", "--port", "--model-path", "--weight-version", "--device", "--dtype", "--log-level"),
        *("--incremental-streaming-output", "--tp"),
    }
    assert arguments[arguments.index("--device") + 1] == "cuda"
    variables = {name: value for name, value in environment(given).items() if not name.startswith("PYTHON")}
    assert variables == {"CUDA_VISIBLE_DEVICES": "2,3", "SGLANG_VLM_CACHE_SIZE_MB": "0"}


async def test_variables_that_somebody_has_set_are_left_as_they_are(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    async with SglangLauncher(options(python, tmp_path)) as it:
        given = environment(it.log_tail().splitlines()[1])
    assert (given["OMP_NUM_THREADS"], given["HF_HUB_OFFLINE"], given["TRANSFORMERS_OFFLINE"]) == ("4", "0", "1")


def launched(**values: Any) -> list[SglangServerOptions]:
    """Tell how the servers of a worker are started."""
    launch = LaunchOptions(Path("/models/tiny"), **values)
    worker = WorkerOptions(address="s:1", run_id="r", reward="m:f", worker_id="w", launch=launch)
    return [host._launcher.options for host in own_hosts(worker)]


def test_engines_of_one_worker_share_out_the_gpus_that_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [each.gpus for each in launched(device="cuda")] == [None]
    each, other = launched(engines=2, device="cuda", gpus_per_engine=2)
    assert (each.device, each.gpus, other.gpus) == ("cuda", ["0", "1"], ["2", "3"])
    assert [each.device for each in launched()] == ["cpu"]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    each, other = launched(engines=2, device="cuda", gpus_per_engine=1)
    assert (each.gpus, other.gpus) == (["GPU-a"], ["GPU-b"])
    with pytest.raises(InvalidField, match="CUDA_VISIBLE_DEVICES"):
        launched(engines=2, device="cuda", gpus_per_engine=2)


async def test_a_server_that_ends_early_is_reported_with_the_end_of_its_log(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SGLANG", "fails")
    with pytest.raises(EngineNotStarted, match="ended with exit code 1 before it was ready") as error:
        await SglangLauncher(options(python, tmp_path)).start()
    assert error.value.log_tail.endswith("fake sglang: no such model")


async def test_a_server_that_is_not_ready_in_time_is_ended_and_reported(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SGLANG", "hangs")
    launcher = SglangLauncher(options(python, tmp_path, ready_timeout_s=1.0))
    starting = asyncio.create_task(launcher.start())
    async with asyncio.timeout(10):
        while launcher.pid is None:  # noqa: ASYNC110 -- nothing tells
            await asyncio.sleep(0.01)
    pid = launcher.pid
    with pytest.raises(EngineNotStarted, match=r"/ready did not answer 200 within 1 s"):
        await starting
    wait_until_gone(pid)


async def test_a_cancelled_start_leaves_nothing_behind(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SGLANG", "hangs")
    launcher = SglangLauncher(options(python, tmp_path))
    starting = asyncio.create_task(launcher.start())
    async with asyncio.timeout(10):
        while launcher.pid is None:  # noqa: ASYNC110 -- nothing tells
            await asyncio.sleep(0.01)
    pid = launcher.pid
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    wait_until_gone(pid)


async def test_a_missing_interpreter_is_reported_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(EngineNotStarted, match=r"install SGLang there first \(deploy/sglang-cpu/install.sh\)"):
        await SglangLauncher(options(tmp_path / "absent", tmp_path)).start()


async def test_a_port_that_was_taken_meanwhile_is_replaced(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = [taken.getsockname()[1], free_port()]
        monkeypatch.setattr(launch, "free_port", lambda: ports.pop(0))
        expected = f"http://127.0.0.1:{ports[1]}"
        async with SglangLauncher(options(python, tmp_path)) as launcher:
            assert launcher.base_url == expected


async def test_a_server_that_ignores_sigterm_is_killed_after_the_grace(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SGLANG", "deaf")
    launcher = SglangLauncher(options(python, tmp_path, stop_grace_s=0.3))
    await launcher.start()
    pid = launcher.pid
    assert pid is not None
    assert await launcher.stop() == -signal.SIGKILL
    wait_until_gone(pid)
    assert await launcher.stop() is None


async def test_a_server_that_dies_is_noticed_and_can_be_started_again(python: Path, tmp_path: Path) -> None:
    launcher = SglangLauncher(options(python, tmp_path))
    await launcher.start()
    assert launcher.pid is not None
    os.kill(launcher.pid, signal.SIGKILL)
    assert await launcher.wait() == -signal.SIGKILL
    await launcher.stop()
    assert (await launcher.start()).startswith("http://127.0.0.1:")
    await launcher.stop()


async def test_a_launched_engine_that_dies_is_explained_and_started_anew(python: Path, tmp_path: Path) -> None:
    launch = LaunchOptions(Path("/models/tiny"), sglang_python=python, log_dir=tmp_path, ready_timeout_s=20)
    (host,) = own_hosts(WorkerOptions(address="s:1", run_id="r", reward="m:f", worker_id="w", launch=launch))
    await host.open()
    assert host.why_ended == ""
    pid = host._launcher.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await host._launcher.wait()
    assert host.ended
    assert f"exit code -9; the end of {tmp_path / 'w.e0.log'}" in host.why_ended
    assert "fake sglang:" in host.why_ended
    await host.revive()
    assert host._launcher.pid != pid
    assert host.why_ended == ""
    await host.close()


@pytest.mark.faults
def test_the_server_dies_with_a_parent_that_is_killed(python: Path, tmp_path: Path) -> None:
    parent = f"""
import asyncio
from pathlib import Path
from rollout_workers.engine.sglang.launch import SglangLauncher
from rollout_workers.engine.sglang.server import SglangServerOptions

async def main():
    log = Path({str(tmp_path / "log")!r})
    options = SglangServerOptions(python=Path({str(python)!r}), model_path=Path("m"), log_path=log)
    launcher = SglangLauncher(options)
    await launcher.start()
    print("pid", launcher.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as process:
        assert process.stdout is not None
        printed = re.fullmatch(r"pid (\d+)\n", process.stdout.readline())
        assert printed is not None
        pgid = int(printed[1])
        assert len(group_members(pgid)) == 2
        process.kill()
    wait_until_gone(pgid)
