"""A real worker and a real trainer that reach the service, in a network namespace from which the store is out of reach.

They work relayed, and status says so; where a way to the store opens they take it, and go back when it is closed.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.mortal import mortal
from tests.support.namespaces import SERVICE, STORE, Namespaces, namespaces
from tests.support.service import ServiceProcess

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

RUN = "far"
DEADLINE_S = 90.0
DIRECT, RELAYING = "rollout_buffer_direct_bytes_total", "rollout_buffer_relaying_clients"

TRAINER = """
import sys
from trainer_client import BufferClient, Policy, SamplingParams, Task

short = SamplingParams(max_new_tokens=64)
tasks = (Task(prompt_token_ids=[1, 2], task_id=f"t{i}", group_size=4, sampling=short) for i in range(9_999))
policy = Policy(batch_groups=4, max_queued_groups=8, overflow_action="block")
with BufferClient(sys.argv[1]) as client, client.session("far", policy=policy, tasks=tasks) as session:
    for _ in sys.stdin:
        batch = next(session)
        session.commit()
        print(*(group.task_id for group in batch.groups), flush=True)
    ledger = client.run("far").ledger
    print(ledger.balanced, ledger.groups.lost.groups)
"""
"""Takes one step for each line, and prints its groups; at the end, whether the ledger balances, and what was lost."""

READ = "import sys, urllib.request; sys.stdout.write(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())"


@pytest.fixture
def apart() -> Iterator[Namespaces]:
    with namespaces() as made:
        yield made


@pytest.fixture
def service(apart: Namespaces, tmp_path: Path) -> Iterator[ServiceProcess]:
    settings = {"rpc_processes": 1, "insecure": True, "payload_listen": f"{STORE}:7000", "direct_from_bytes": 1}
    made = ServiceProcess(tmp_path / "data", settings, within=apart.service)
    made.listen = f"{SERVICE}:0"
    made.start()
    yield made
    made.stop()


class Loop:
    """The worker, and the trainer, in the namespace of clients."""

    def __init__(self, apart: Namespaces, service: ServiceProcess, folder: Path) -> None:
        self._apart, self._service = apart, service
        worker = ("-m", "buffer_cli", "worker", "--run", RUN, "--simulate", "--tokens-per-s", "2000")
        options = ("--reward", "examples.quickstart.rewards:even_share", "--weights-dir", str(folder / "weights"))
        self._trainer = self._started("-c", TRAINER, service.address)
        self._worker = self._started(*worker, *options, "--address", service.address)
        self.trained: list[str] = []

    def step(self) -> None:
        assert self._trainer.stdin is not None
        assert self._trainer.stdout is not None
        self._trainer.stdin.write("\n")
        self._trainer.stdin.flush()
        self.trained += self._trainer.stdout.readline().split()

    def step_until(self, name: str, label: str, met: Callable[[dict[str, float]], bool]) -> None:
        """Go on until the metric's values are so."""
        deadline = time.monotonic() + DEADLINE_S
        while not met(seen := self.metrics(name, label)):
            assert time.monotonic() < deadline, seen
            self.step()

    def status(self) -> list[str]:
        shown = self._read(self._apart.clients, "-m", "buffer_cli", "status", "--address", self._service.address)
        return [" ".join(line.split()) for line in shown.splitlines() if "relayed" in line]

    def metrics(self, name: str, label: str) -> dict[str, float]:
        """Values by a label; none in a scrape that could not read the run in time."""
        text = self._read(self._apart.service, "-c", READ, f"{self._service.admin}/metrics")
        families = text_string_to_metric_families(text)
        return {one.labels[label]: one.value for family in families for one in family.samples if one.name == name}

    def end(self) -> str:
        """The trainer's last words."""
        said, _ = self._trainer.communicate(timeout=DEADLINE_S)
        return str(said).strip()

    def stop(self) -> None:
        for process in (self._trainer, self._worker):
            process.terminate()
            process.communicate(timeout=DEADLINE_S)

    def _started(self, *arguments: str) -> subprocess.Popen[str]:
        command = mortal(["/usr/bin/env", *self._apart.clients, sys.executable, *arguments])
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @staticmethod
    def _read(within: list[str], *arguments: str) -> str:
        command, wide = [*within, sys.executable, *arguments], {**os.environ, "COLUMNS": "200"}
        return subprocess.run(command, env=wide, capture_output=True, text=True, check=True, timeout=DEADLINE_S).stdout


@pytest.fixture
def loop(apart: Namespaces, service: ServiceProcess, tmp_path: Path) -> Iterator[Loop]:
    made = Loop(apart, service, tmp_path)
    yield made
    made.stop()


def test_clients_relay_where_they_cannot_reach_the_store_and_go_directly_where_they_can(
    apart: Namespaces, loop: Loop
) -> None:
    loop.step()
    loop.step_until(RELAYING, "of", lambda clients: clients == {"pushes": 1, "pulls": 1})
    assert loop.status() == [
        f"relayed {what} 1 client: the store at {STORE}:7000: [Errno 101] Network is unreachable (1)"
        for what in ("pushes", "pulls")
    ]
    assert not any(loop.metrics(DIRECT, "method").values())

    apart.open_store()
    loop.step_until(RELAYING, "of", lambda clients: clients == {"pushes": 0, "pulls": 0})
    loop.step_until(DIRECT, "method", lambda sizes: min(sizes["PushGroups"], sizes["PullBatch"]) > 0)
    assert loop.status() == []

    apart.close_store()
    loop.step_until(RELAYING, "of", lambda clients: clients == {"pushes": 1, "pulls": 1})
    assert len(loop.status()) == 2
    loop.step()

    assert len(set(loop.trained)) == len(loop.trained), "no group was trained twice"
    assert loop.end() == "True 0", "the ledger balances, and nothing was lost"
