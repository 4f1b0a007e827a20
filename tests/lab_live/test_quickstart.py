"""Staleness of what a new user sees first, the loop of docs/quickstart.md: as its status predicts."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.lab.live import TOLERANCE
from tests.docs.pages import ROOT
from tests.support.service import running_service
from trainer_client import BufferClient

STEPS = 35
"""More than the publishes that the status looks back over."""


@contextmanager
def running(address: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", *arguments]
    environment = {**os.environ, "RB_ADDRESS": address}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


@pytest.mark.timeout(180)
def test_the_quickstart_is_as_stale_as_its_status_predicts(tmp_path: Path) -> None:
    worker = (
        "buffer_cli",
        "worker",
        "--run",
        "first",
        "--simulate",
        "--reward",
        "examples.quickstart.rewards:even_share",
    )
    with (
        running_service(tmp_path) as service,
        running(service.address, *worker),
        running(service.address, "examples.quickstart.trainer") as trainer,
        BufferClient(service.address) as client,
    ):
        assert trainer.stdout is not None
        for line in trainer.stdout:
            if line.startswith(f"step {STEPS}:"):
                break
        estimate = client.run("first").estimate
        # As the command waits for the simulation.
        while estimate is not None and estimate.predicted.pending:
            estimate = client.run("first").estimate
    assert estimate is not None
    assert estimate.predicted.simulated
    measured, predicted = estimate.measured.staleness, estimate.predicted.staleness
    print(f"staleness predicted {predicted}, measured {measured}")
    assert measured is not None
    assert predicted is not None
    assert abs(measured - predicted) <= TOLERANCE
