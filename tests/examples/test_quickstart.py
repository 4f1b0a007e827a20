"""Tests of what docs/quickstart.md says happens: batches in order, and the same one again after a kill -9 of the
trainer.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.support.service import running_service
from trainer_client import BufferClient

TRAINER = """
import runpy, sys, threading, time

sleep = time.sleep

def train(seconds):
    # The program's own sleep stands for a training step; threads of the client sleep as ever.
    if threading.current_thread() is threading.main_thread() and seconds == 1:
        sys.stdin.readline()
    else:
        sleep(seconds)

time.sleep = train
runpy.run_module("examples.quickstart.trainer", run_name="__main__")
"""
"""The trainer of the page, of which each training step lasts until the test says a line."""

LINE = re.compile(r"step (?P<step>\d+)(?P<again> \(again\))?: (?P<groups>[q\d ]+), reward 0\.\d\d, staleness \d+\n")


@contextmanager
def running(address: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A program of the checkout; killed in the end."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "RB_ADDRESS": address},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.stdout.close()


def end_step(process: subprocess.Popen[str]) -> None:
    """End the trainer's training step; it publishes then."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def next_line(process: subprocess.Popen[str]) -> re.Match[str]:
    """The next line of the trainer; pytest's timeout ends the wait for it."""
    assert process.stdout is not None
    line = process.stdout.readline()
    matched = LINE.fullmatch(line)
    assert matched is not None, line + process.stdout.read()
    return matched


def test_the_trainer_of_the_quickstart_gets_its_batch_again_after_a_kill(tmp_path: Path) -> None:
    worker = ("-m", "buffer_cli", "worker", "--run", "first", "--simulate", "--progress-every-s", "0")
    reward = ("--reward", "examples.quickstart.rewards:even_share", "--weights-dir", str(tmp_path / "weights"))
    trainer = ("-c", TRAINER)
    with running_service(tmp_path) as service, running(service.address, *worker, *reward):
        with running(service.address, *trainer) as first:
            lines = [next_line(first)]
            end_step(first)
            lines.append(next_line(first))
        with running(service.address, *trainer) as second:
            lines.append(next_line(second))
            end_step(second)
            lines.append(next_line(second))
        with BufferClient(service.address) as client:
            run = client.run("first")
    assert [(line["step"], line["again"]) for line in lines] == [
        ("0", None),
        ("1", None),
        ("1", " (again)"),
        ("2", None),
    ]
    assert lines[2]["groups"] == lines[1]["groups"]
    trained = [task for line in (*lines[:2], lines[3]) for task in line["groups"].split()]
    assert sorted(trained, key=lambda task: int(task[1:])) == [f"q{i}" for i in range(24)]
    assert run.ledger.balanced
    assert run.ledger.groups.dropped_overflow.groups == run.ledger.groups.dropped_stale.groups == 0


@pytest.mark.parametrize("name", ["trainer", "rewards"])
def test_the_page_shows_the_programs_as_they_are(name: str) -> None:
    source = (ROOT / f"examples/quickstart/{name}.py").read_text()
    # Without the docstring of the module.
    program = source.split('"""\n', 1)[1].strip()
    shown = [block.text.strip() for block in blocks(ROOT / "docs/quickstart.md") if block.language == "python"]
    assert program in shown
