"""Trainer, worker and service killed while groups are used again: none has more uses than it may, and each is its own.

Engines are simulated, everything else is real. The trainer is a process that keeps a journal in place of a model.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.service import running_service
from tests.workers.process import worker_process
from trainer_client import BufferClient, ClientOptions, Policy, SamplingParams, SessionOptions, Task
from trainer_client.batch import Batch

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

RUN, BATCH_GROUPS, STEPS, USES, REUSED, OLDEST = "r", 3, 24, 3, 2, 6
POLICY = Policy(
    batch_groups=BATCH_GROUPS,
    max_queued_groups=6,
    overflow_action="block",
    max_lookahead=1,
    max_attempts=20,
    max_uses=USES,
    reuse_share_milli=1_000 * REUSED // BATCH_GROUPS + 1,
    reuse_max_staleness=OLDEST,
)
DEATHS = ("pulled", "published", "checkpointed")
"""Places where the trainer dies, in the order of its lives."""
ENGINE = ("--simulate", "--tokens-per-s", "400", "--groups-per-engine", "4", "--lease-wait-s", "1")


def tasks() -> list[Task]:
    return [
        Task(task_id=f"t{i}", group_size=2, sampling=SamplingParams(max_new_tokens=8), prompt_token_ids=[1, 2, i % 40])
        for i in range(STEPS * BATCH_GROUPS)
    ]


def _write(**line: object) -> None:
    with Path(sys.argv[2]).open("ab") as file:
        file.write(json.dumps(line).encode() + b"\n")


def _read(journal: Path, what: str) -> list[Any]:
    lines = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    return [line[what] for line in lines if what in line]


def train(address: str, journal: Path) -> None:
    """Train to the end, or to the next death."""
    died = _read(journal, "death")
    place = next((place for place in DEATHS if place not in died), "")

    def arrive(at: str, batch: Batch) -> None:
        if at == place and batch.info.reused_groups and batch.step % 8 == 5:
            _write(death=at)
            os.kill(os.getpid(), signal.SIGKILL)

    with (
        BufferClient(address, ClientOptions(timeout_s=60)) as client,
        client.session(
            RUN,
            policy=POLICY,
            tasks=tasks(),
            next_step=max(_read(journal, "checkpoint"), default=None),
            options=SessionOptions(pull_timeout_s=90, max_pending_tasks=16, chunk_tasks=4),
        ) as session,
    ):
        for pulled in session:
            batch: Batch = pulled
            groups = [
                [group.task_id, group.prior_uses, group.staleness, hashlib.sha256(group.payload).hexdigest()]
                for group in batch.groups
            ]
            assert len(groups) == batch.info.total_groups == BATCH_GROUPS + batch.info.reused_groups
            _write(step=[batch.step, groups])
            arrive("pulled", batch)
            session.publish()
            arrive("published", batch)
            if session.next_step % 2 == 0:
                _write(checkpoint=session.next_step)
                session.checkpoint()
                arrive("checkpointed", batch)


def _check_uses(steps: dict[int, list[Any]]) -> int:
    """Count the groups that were used again: every step has as many as it may have, each in its turn and its own."""
    began: dict[str, tuple[int, str]] = {}
    seen: Counter[str] = Counter()
    reused = 0
    for step in sorted(steps):
        # An engine that falls behind leaves groups that are too stale to be used again.
        able = {name for name, uses in seen.items() if uses < USES and step - began[name][0] <= OLDEST}
        drawn = [name for name, uses, _, _ in steps[step] if uses]
        assert len(drawn) == min(REUSED, len(able)), f"step {step} uses as many again as it may"
        assert able.issuperset(drawn)
        reused += len(drawn)
        for name, uses, staleness, body in steps[step]:
            assert uses == seen[name], "uses are counted one by one"
            assert began.setdefault(name, (step - staleness, body)) == (step - staleness, body), "it is the same group"
        seen.update(name for name, *_ in steps[step])
    return reused


def test_a_group_is_used_as_often_as_it_may_whatever_is_killed(tmp_path: Path) -> None:
    journal, log = tmp_path / "journal", tmp_path / "trainer.log"

    def life(address: str) -> int:
        command = [sys.executable, "-m", "tests.faults.test_reuse", address, str(journal)]
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
        before = client.run(RUN).reuse
        service.kill()
        service.start()
        assert client.run(RUN).reuse == before
        assert before.drawn > 0
        with worker_process(service.address, RUN, tmp_path, *ENGINE) as again:
            while (code := life(service.address)) == -signal.SIGKILL:
                pass
            assert code == 0, log.read_text()
            assert again.stop() == 0
        run = client.run(RUN)

    assert _read(journal, "death") == list(DEATHS)
    steps: dict[int, list[Any]] = {}
    for step, groups in _read(journal, "step"):
        assert steps.setdefault(step, groups) == groups, "a step that comes again is what it was"
    assert sorted(steps) == list(range(STEPS))
    own = [(step, name) for step, groups in steps.items() for name, uses, _, _ in groups if uses == 0]
    assert sorted(name for _, name in own) == sorted(task.task_id for task in tasks())
    reused = _check_uses(steps)
    assert reused > 0
    assert (run.reuse.drawn, run.reuse.trained, run.reuse.lost) == (reused, reused, 0)
    assert run.ledger.groups.trained.groups == STEPS * BATCH_GROUPS
    assert run.ledger.balanced


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]))
