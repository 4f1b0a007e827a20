"""Weights broadcast over gloo to two real SGLang servers while they generate, one of which is killed again and again.

Version v of the weights always emits token FIRST + v, so which weights made a token can be read off the token.
"""

import itertools
import json
import os
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.test_worker_engine import FIRST, RESPONSE_TOKENS, check_tokens, endless, until
from tests.support.processes import children
from tests.support.service import running_service
from tests.support.sglang_python import sglang_python
from tests.support.tiny_model import write_constant_model, write_random_model
from tests.workers.process import WorkerProcess, worker_process
from trainer_client import BufferClient, ClientOptions, Policy, SessionOptions, TrainerSession, manifest_of
from trainer_client.batch import Batch
from trainer_client.publish import CollectivePublisher
from trainer_client.publish.collective.plan import CollectivePlan

torch = pytest.importorskip("torch")
from safetensors.torch import load_file  # noqa: E402 - it needs torch

UPDATES = 8
TIMEOUT_S = 20.0


class Interfering(BufferClient):
    """A client that kills a process when a broadcast is announced, before any member has received."""

    victim = 0
    announced: list[CollectivePlan]

    def plan_collective(self, run_id: str, *, term: int, plan: CollectivePlan, timeout_s: float | None = None) -> None:
        self.announced = [*getattr(self, "announced", []), plan]
        if plan.phase == "broadcast" and self.victim:
            os.kill(self.victim, signal.SIGKILL)
            self.victim = 0
        super().plan_collective(run_id, term=term, plan=plan, timeout_s=timeout_s)


def servers(worker: WorkerProcess) -> dict[int, int]:
    """Pid of each server by its port."""
    found = {}
    for pid in children(worker.process.pid):
        said = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        if "sglang.launch_server" in said:
            found[int(said[said.index("--port") + 1])] = pid
    return found


def checksums(port: int) -> object:
    body = json.dumps({"action": "checksum"}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/weights_checker", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def check_kept_tokens(batch: Batch) -> None:
    """Tokens that a killed engine had sent may be credited to older weights than made them, never to newer ones."""
    for sample in batch.samples:
        assert sample.tokens - sample.prompt_len == RESPONSE_TOKENS
        for span in sample.spans:
            made_by = {token - FIRST for token in sample.token_ids[span.start : span.end].tolist()}
            assert min(made_by) >= span.version.version
            assert max(made_by) <= batch.info.train_version


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    """Directories of versions 0, 1, …"""
    return [write_constant_model(tmp_path / f"model-{v}", FIRST + v) for v in range(4 * UPDATES)]


@pytest.mark.engine
@pytest.mark.faults
@pytest.mark.timeout(600)
def test_real_engines_hold_what_was_broadcast_and_a_killed_one_is_left_out_and_rejoins(
    tmp_path: Path, models: list[Path]
) -> None:
    random = write_random_model(tmp_path / "random", seed=3)
    engines = (
        "--launch", str(models[0]), "--engines", "2", "--sglang-python", str(sglang_python()), "--ready-timeout-s",
        "240", "--groups-per-engine", "4", "--lease-wait-s", "2",
    )  # fmt: skip
    policy = Policy(
        batch_groups=4, max_queued_groups=8, overflow_action="block", max_staleness=8, max_attempts=20,
        retry_backoff_ms=100,
    )  # fmt: skip
    options = SessionOptions(pull_timeout_s=200)
    with (
        running_service(tmp_path / "service") as service,
        Interfering(service.address, ClientOptions(timeout_s=60)) as client,
        CollectivePublisher(timeout_s=TIMEOUT_S) as publisher,
        worker_process(service.address, "r", tmp_path, *engines) as worker,
        client.session("r", policy=policy, tasks=endless(), publisher=publisher, options=options) as session,
    ):
        until(lambda: ready(client) == 2, "both engines are ready", 300)

        def train(steps: int, check: Callable[[Batch], None] = check_kept_tokens) -> None:
            for batch in itertools.islice(session, steps):
                check(batch)
                session.publish(load_file(models[session.version + 1] / "model.safetensors"), wait_for=1)

        train(UPDATES, check_tokens)
        session.wait_for_engines(2, timeout_s=60)
        state = client.run("r")
        assert [engine.reloads for engine in state.engines] == [UPDATES, UPDATES]
        assert [engine.errors for engine in state.engines] == [0, 0]
        assert [engine.membership for engine in state.engines] == [1, 1]
        assert state.statistics["assembled_groups_spanning_versions"] > 0

        # Killed between updates: it is noticed at the latest when it should pause.
        os.kill(max(servers(worker).values()), signal.SIGKILL)
        train(3)
        rejoin(client, session, models, worker)

        # Killed between the announcement and the receiving.
        client.victim = max(servers(worker).values())
        train(1)
        assert client.victim == 0
        assert len(client.announced[-1].members) == 1
        rejoin(client, session, models, worker)
        train(2)

        # To the bit what was sent: the same as when the engine reads the files itself.
        session.publish(load_file(random / "model.safetensors"), wait_for=2)
        ports = sorted(servers(worker))
        received = [checksums(port) for port in ports]
        session.publish(manifest_of(random), wait_for=2)
        assert [checksums(port) for port in ports] == received
        assert received[0] == received[1]
        assert worker.stop() == 0
        state = client.run("r")
    assert state.ledger.balanced
    assert state.ledger.tasks.leased == 0


def ready(client: BufferClient) -> int:
    return sum(engine.state == "ready" for engine in client.run("r").engines)


def rejoin(client: Interfering, session: TrainerSession, models: list[Path], worker: WorkerProcess) -> None:
    """Wait until the killed engine's successor can take part, and see that it does."""

    def takes_part() -> bool:
        states = [engine.state for engine in client.run("r").engines]
        return len(servers(worker)) == 2 and all(state in ("ready", "loading") for state in states)

    until(takes_part, "a new server runs", 240)
    session.publish(load_file(models[session.version + 1] / "model.safetensors"), wait_for=2, timeout_s=120)
    assert len(client.announced[-1].members) == 2
    assert {engine.membership for engine in client.run("r").engines} == {client.announced[-1].membership}
