"""A trainer killed in the middle of a broadcast to real engines: they generate on, and the next trainer goes on."""

import itertools
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.dying_trainer import UPDATES_BEFORE
from tests.e2e.test_worker_engine import FIRST, check_tokens, endless, until
from tests.support.service import running_service
from tests.support.sglang_python import sglang_python
from tests.support.tiny_model import write_constant_model
from tests.workers.process import worker_process
from trainer_client import BufferClient, ClientOptions, SessionOptions
from trainer_client.publish import CollectivePublisher

BACK_WITHIN_S = 20.0
"""The engines are free when the trainer's connections are; the workers' next look at them takes a few seconds."""


@pytest.mark.engine
@pytest.mark.faults
@pytest.mark.timeout(600)
def test_engines_generate_on_when_the_trainer_is_killed_in_a_broadcast(tmp_path: Path) -> None:
    for version in range(8):
        write_constant_model(tmp_path / f"model-{version}", FIRST + version)
    engines = (
        "--launch", str(tmp_path / "model-0"), "--engines", "2", "--sglang-python", str(sglang_python()),
        "--ready-timeout-s", "240", "--groups-per-engine", "4", "--lease-wait-s", "2",
    )  # fmt: skip
    with (
        running_service(tmp_path / "service") as service,
        BufferClient(service.address, ClientOptions(timeout_s=60)) as client,
        worker_process(service.address, "r", tmp_path, *engines) as worker,
    ):
        until(lambda: worker.said().count("engines ready") == 1, "the engines are started", 240)
        trainer = [sys.executable, "-m", "tests.e2e.dying_trainer", service.address, str(tmp_path)]
        assert subprocess.run(trainer, timeout=300, check=False).returncode == -signal.SIGKILL
        died = time.monotonic()

        until(
            lambda: all(engine.state == "ready" for engine in client.run("r").engines),
            "both engines are in service",
            BACK_WITHIN_S,
        )
        assert time.monotonic() - died < BACK_WITHIN_S
        for engine in client.run("r").engines:
            # What was on its way was not published, and is nowhere.
            assert (engine.loaded.version, engine.membership) == (UPDATES_BEFORE, 0)
            assert "Failed to receive weights" in engine.last_error

        with (
            CollectivePublisher(timeout_s=60) as publisher,
            client.session(
                "r", tasks=endless(), publisher=publisher, options=SessionOptions(pull_timeout_s=300)
            ) as session,
        ):
            for batch in itertools.islice(session, 3):
                check_tokens(batch)
                session.publish(load_file(tmp_path / f"model-{session.version + 1}" / "model.safetensors"), wait_for=2)
            assert session.version == UPDATES_BEFORE + 3
        assert worker.stop() == 0
        assert client.run("r").ledger.balanced
