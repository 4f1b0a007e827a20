"""Tests of `rollout_buffer.local`: one file, one process tree, and what is left of it."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

import rollout_buffer
from buffer_cli.local import LocalFailed
from buffer_wire.errors import InvalidField
from tests.docs.pages import ROOT
from trainer_client import SamplingParams, Task

DEADLINE_S = 60.0
IN_A_LOOP = """
import asyncio, runpy

async def cell():
    runpy.run_path("examples/tour.py", run_name="__main__")

asyncio.run(cell())
"""
"""The tour as a notebook runs it: within an event loop."""

AT_A_TERMINAL = """
import runpy, signal

signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background was told to ignore it
runpy.run_path("examples/tour.py", run_name="__main__")
"""


class Tour:
    """The tour in a process, whose descendants are known by a mark in their environment."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._mark = f"RB_TEST_MARK={uuid.uuid4().hex}"
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, **dict([self._mark.split("=")]), "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def line_with(self, part: str) -> None:
        assert self.process.stdout is not None
        lines: list[str] = []
        while part not in (line := self.process.stdout.readline()):
            assert line, "".join(lines)
            lines.append(line)

    def alive(self) -> list[str]:
        """Command lines of all processes with the mark."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if self._mark.encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue  # ended, or no process
        return found

    def until_nothing_is_left(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while left := self.alive():
            assert time.monotonic() < deadline, left
            time.sleep(0.1)


def test_a_whole_loop_runs_in_one_file_within_an_event_loop_and_leaves_nothing(tmp_path: Path) -> None:
    tour = Tour(tmp_path, "-c", IN_A_LOOP)
    shown, _ = tour.process.communicate(timeout=100)
    assert tour.process.returncode == 0, shown
    assert "step 9: 8 groups, reward 0." in shown
    tour.until_nothing_is_left()
    assert list(tmp_path.glob("rollout-buffer-*")) == []


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_a_kill_leave_no_process(tmp_path: Path, sent: signal.Signals) -> None:
    tour = Tour(tmp_path, "-c", AT_A_TERMINAL)
    tour.line_with("step 1:")
    assert any("serve" in command for command in tour.alive())
    tour.process.send_signal(sent)
    shown, _ = tour.process.communicate(timeout=DEADLINE_S)
    assert tour.process.returncode == -sent, shown
    assert ("KeyboardInterrupt" in shown) == (sent == signal.SIGINT)
    tour.until_nothing_is_left()


def test_what_does_not_start_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="no_such_module"), rollout_buffer.local("no_such_module:reward"):
        pass
    with pytest.raises(InvalidField, match="top of a module"), rollout_buffer.local(lambda _: 0.0):
        pass
    (tmp_path / "service").mkdir()
    (tmp_path / "service" / "store").write_text("in the way")
    with pytest.raises(LocalFailed, match="the service did not start"), rollout_buffer.local("a:b", data_dir=tmp_path):
        pass


def test_a_worker_that_ends_by_itself_ends_the_loop_with_its_reason(tmp_path: Path) -> None:
    from rollout_workers.engine.options import LaunchOptions

    absent = LaunchOptions(tmp_path / "model", sglang_python=tmp_path / "python")
    with (
        pytest.raises(LocalFailed, match=r"the worker ended: .*python"),
        rollout_buffer.local("examples.quickstart.rewards:even_share", engine=absent) as buffer,
        buffer.session(
            [Task(prompt_token_ids=[1], group_size=1, sampling=SamplingParams(max_new_tokens=1))]
        ) as session,
    ):
        next(iter(session))
