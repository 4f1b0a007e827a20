"""The worker with a real SGLang server that it starts itself: groups pushed, reloads in flight, the server killed.

Version v of the weights always emits token FIRST + v, so which weights made a token can be read off the token.
"""

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.service import running_service
from tests.support.sglang_python import sglang_python
from tests.support.tiny_model import write_constant_model
from tests.workers.process import WorkerProcess, worker_process
from trainer_client import BufferClient, ClientOptions, Policy, SamplingParams, SessionOptions, Task
from trainer_client.batch import Batch
from trainer_client.publish import FilesPublisher

FIRST = 100
RESPONSE_TOKENS = 160


def endless() -> Iterator[Task]:
    for i in itertools.count():
        sampling = SamplingParams(max_new_tokens=RESPONSE_TOKENS, temperature=0.7)
        yield Task(task_id=f"t{i:05d}", group_size=4, sampling=sampling, prompt_token_ids=[5, 6, 7 + i % 5])


def weights(version: int) -> Callable[[Path], object]:
    return lambda directory: write_constant_model(directory, FIRST + version)


def check_tokens(batch: Batch, *, labelled_late: int = 0) -> None:
    for sample in batch.samples:
        assert sample.tokens - sample.prompt_len == RESPONSE_TOKENS
        for span in sample.spans:
            made_by = {token - FIRST for token in sample.token_ids[span.start : span.end].tolist()}
            assert made_by <= {span.version.version + late for late in range(labelled_late + 1)}
        # A model that is sure of its token gives it a probability of nearly 1.
        np.testing.assert_allclose(sample.logprobs, 0.0, atol=0.05)


def until(holds: Callable[[], bool], what: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"still not: {what}"
        time.sleep(0.1)


def server_pid(worker: WorkerProcess) -> int:
    children = Path(f"/proc/{worker.process.pid}/task/{worker.process.pid}/children").read_text().split()
    for child in children:
        if b"sglang.launch_server" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise AssertionError(f"no server among {children}")


@pytest.mark.engine
@pytest.mark.faults
@pytest.mark.timeout(420)
def test_real_engine_reloads_in_flight_and_is_started_again_when_it_is_killed(tmp_path: Path) -> None:
    base = write_constant_model(tmp_path / "base", FIRST)
    engine = (
        "--launch", str(base), "--sglang-python", str(sglang_python()), "--ready-timeout-s", "180",
        "--groups-per-engine", "6", "--lease-wait-s", "2",
    )  # fmt: skip
    policy = Policy(
        batch_groups=4, max_queued_groups=8, overflow_action="block", max_staleness=8, max_attempts=20,
        retry_backoff_ms=100,
    )  # fmt: skip
    options = SessionOptions(pull_timeout_s=200)
    with (
        running_service(tmp_path / "service") as service,
        BufferClient(service.address, ClientOptions(timeout_s=60)) as client,
        FilesPublisher(tmp_path / "published", serve="http", patches=2) as publisher,
        worker_process(service.address, "r", tmp_path, *engine) as worker,
        client.session("r", policy=policy, tasks=endless(), publisher=publisher, options=options) as session,
    ):
        for batch in itertools.islice(session, 8):
            check_tokens(batch)
            session.publish(weights(batch.step + 1))
        until(lambda: client.run("r").engines[0].loaded.version == 8, "the engine has loaded version 8", 30)
        before = client.run("r")
        assert before.statistics["assembled_groups_spanning_versions"] > 0
        assert before.engines[0].reloads >= 5
        assert "made of earlier versions" in before.engines[0].weights_from
        assert before.engines[0].errors == 0

        os.kill(server_pid(worker), signal.SIGKILL)
        for batch in itertools.islice(session, 6):
            # Tokens of a killed server may be said to be one version older than they are (docs/engines.md).
            check_tokens(batch, labelled_late=1)
        # The new server starts with the base model: nothing of it may be left in what it generates now.
        assert min(group.tail_version for group in batch.groups) >= 8
        assert worker.stop() == 0
        state = client.run("r")
    assert "engine is back" in worker.said()
    assert state.ledger.balanced
    assert state.ledger.tasks.leased == 0
    assert state.statistics["staleness_max"] <= 8
    assert state.engines[0].state == "stopped"
