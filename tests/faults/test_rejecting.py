"""Trainer, worker and service killed while a step is given back in part: groups are rejected once, and replaced once.

Engines are simulated, everything else is real. The trainer is a process that keeps a journal in place of a model.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.service import running_service
from tests.workers.process import worker_process
from trainer_client import BufferClient, ClientOptions, Policy, SamplingParams, SessionOptions, Task
from trainer_client.batch import Batch, Group

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

RUN, BATCH_GROUPS, STEPS = "r", 3, 24
BAD = 9
"""Tasks that come to nothing."""
POLICY = Policy(
    batch_groups=BATCH_GROUPS, max_queued_groups=6, overflow_action="block", max_lookahead=1, max_attempts=20
)
DEATHS = ("judged", "rejected", "made up", "published")
"""Places where the trainer dies, in the order of its lives.

Before it gives a group back; when it has, and has not heard so; when it has the others; when it has published, and not
checkpointed.
"""
ENGINE = ("--simulate", "--tokens-per-s", "400", "--groups-per-engine", "4", "--lease-wait-s", "1")


def tasks() -> list[Task]:
    return [
        Task(task_id=f"t{i}", group_size=2, sampling=SamplingParams(max_new_tokens=8), prompt_token_ids=[1, 2, i % 40])
        for i in range(STEPS * BATCH_GROUPS + BAD)
    ]


def is_bad(group: Group) -> bool:
    return int(group.task_id[1:]) % 8 == 3 and int(group.task_id[1:]) < 8 * BAD


class Dying(BufferClient):
    """A client of a trainer that dies at a place."""

    place = ""

    def reject(self, run_id: str, **given: object) -> object:  # type: ignore[override]
        """Give groups back, and perhaps hear no more of it."""
        said = super().reject(run_id, **given)  # type: ignore[arg-type]
        self.arrive("rejected", bool(given["group_ids"]))
        return said

    def arrive(self, at: str, is_it: bool = True) -> None:
        if is_it and at == self.place:
            _write(death=at)
            os.kill(os.getpid(), signal.SIGKILL)


def _write(**line: object) -> None:
    with Path(sys.argv[2]).open("ab") as file:
        file.write(json.dumps(line).encode() + b"\n")


def _read(journal: Path, what: str) -> list[Any]:
    lines = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    return [line[what] for line in lines if what in line]


def train(address: str, journal: Path) -> None:
    """Train to the end, or to the next death."""
    died = _read(journal, "death")
    next_step = max(_read(journal, "checkpoint"), default=None)
    with (
        Dying(address, ClientOptions(timeout_s=60)) as client,
        client.session(
            RUN,
            policy=POLICY,
            tasks=tasks(),
            next_step=next_step,
            options=SessionOptions(pull_timeout_s=90, max_pending_tasks=16, chunk_tasks=4),
        ) as session,
    ):
        client.place = next((place for place in DEATHS if place not in died), "")
        for pulled in session:
            batch: Batch = pulled
            while bad := [group for group in batch.groups if is_bad(group)]:
                _write(bad=[batch.step, [group.task_id for group in bad]])
                client.arrive("judged")
                batch = session.reject(batch, bad, "comes to nothing")
                client.arrive("made up")
            assert len(batch.groups) == batch.info.total_groups == BATCH_GROUPS
            _write(step=[batch.step, [group.task_id for group in batch.groups]])
            session.publish()
            client.arrive("published", batch.step > STEPS // 2)
            if session.next_step % 2 == 0:
                _write(checkpoint=session.next_step)
                session.checkpoint()


def test_groups_are_rejected_once_and_replaced_once(tmp_path: Path) -> None:
    journal, log = tmp_path / "journal", tmp_path / "trainer.log"

    def life(address: str) -> int:
        command = [sys.executable, "-m", "tests.faults.test_rejecting", address, str(journal)]
        with log.open("ab") as said:
            return subprocess.run(command, stdout=said, stderr=said, timeout=90, check=False).returncode

    with (
        running_service(tmp_path / "service") as service,
        BufferClient(service.address, ClientOptions(timeout_s=60)) as client,
    ):
        client.create_run(RUN, POLICY)
        with worker_process(service.address, RUN, tmp_path, *ENGINE) as worker:
            for _ in DEATHS[:2]:
                assert life(service.address) == -signal.SIGKILL, log.read_text()
            worker.kill()
        lacking = client.run(RUN).missing_groups
        service.kill()
        service.start()
        assert client.run(RUN).missing_groups == lacking > 0
        with worker_process(service.address, RUN, tmp_path, *ENGINE) as again:
            while (code := life(service.address)) == -signal.SIGKILL:
                pass
            assert code == 0, log.read_text()
            assert again.stop() == 0
        run = client.run(RUN)

    assert _read(journal, "death") == list(DEATHS)
    steps: dict[int, list[str]] = {}
    for step, names in _read(journal, "step"):
        assert steps.setdefault(step, names) == names, "a step that comes again is what it was"
    bad = {f"t{8 * i + 3}" for i in range(BAD)}
    trained = [name for groups in steps.values() for name in groups]
    assert sorted(trained) == sorted({task.task_id for task in tasks()} - bad)
    groups = run.ledger.groups
    assert (groups.rejected.groups, groups.trained.groups, groups.lost.groups) == (BAD, STEPS * BATCH_GROUPS, 0)
    assert run.ledger.balanced
    assert run.missing_groups == 0


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]))
