"""Outcomes to an iterable of tasks, exactly once: trainer, worker and service are killed at random all the while."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollout_buffer.v1 import runs_pb2
from tests.faults.reporting import RUN, TASKS, is_kept, rewards_of
from tests.support.service import ServiceProcess, running_service
from trainer_client import BufferClient, ClientOptions
from trainer_client.session.outcomes import Position

pytestmark = pytest.mark.faults

KILLS = 12


class Part:
    """A process that is killed and started again."""

    def __init__(self, role: str, address: str) -> None:
        self._command = [sys.executable, "-m", "tests.faults.reporting", role, address]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def fates(records: list[runs_pb2.Record]) -> list[list[object]]:
    """Ends of every group and failed task in their order, from the recording alone."""
    rewards: dict[str, list[float]] = {}
    steps: dict[str, int] = {}
    ended: list[list[object]] = []
    over: set[str] = set()

    def end(group_id: str, disposition: str) -> None:
        if group_id not in over:
            over.add(group_id)
            name = group_id.partition("/")[0]
            ended.append([name, name, rewards.get(group_id, []), disposition])

    for record in records:
        kind = record.WhichOneof("event")
        if kind == "accepted":
            rewards[record.accepted.group_id] = list(record.accepted.rewards)
            if record.accepted.state == "filtered":
                end(record.accepted.group_id, "filtered")
        elif kind == "moved" and record.moved.state != "queued":
            end(record.moved.group_id, record.moved.state)
        elif kind == "micro_batch":
            steps |= dict.fromkeys(record.micro_batch.group_ids, record.micro_batch.step)
        elif kind == "trained":
            for group_id, step in steps.items():
                if step < record.trained.committed_steps:
                    end(group_id, "trained")
        elif kind == "failed":
            end(record.failed.group_id, "failed")
    return ended


def wound(rng: random.Random, service: ServiceProcess, trainer: Part, worker: Part) -> None:
    """Kill one of them, or all, and start it again."""
    victims = rng.choice([["trainer"], ["trainer"], ["worker"], ["service"], ["trainer", "service", "worker"]])
    if "trainer" in victims:
        trainer.kill()
    if "worker" in victims:
        worker.kill()
    if "service" in victims:
        service.kill()
        service.start()
    if "worker" in victims:
        worker.start()
    if "trainer" in victims:
        trainer.start()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_outcome_is_heard_once_whatever_is_killed(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with (
        running_service(tmp_path, rpc_processes=2) as service,
        BufferClient(service.address, ClientOptions(timeout_s=60)) as client,
    ):
        worker, trainer = Part("worker", service.address), Part("trainer", service.address)
        try:
            for _ in range(KILLS):
                time.sleep(rng.uniform(0.2, 1.5))
                wound(rng, service, trainer, worker)
            while trainer.process.wait(120) != 0:
                raise AssertionError("the last trainer failed")
        finally:
            trainer.kill()
            worker.kill()
        position, state = Position.unwrap(client.resume(RUN).feeder_state)
        records = client.read_records(RUN, "", 1_000_000)
        ledger = client.ledger(RUN)
    drawn, heard = json.loads(state)
    assert drawn == TASKS
    assert sorted(heard) == sorted(fates(records))
    groups = [each for each in heard if each[3] != "failed"]
    # What is queued for a batch that never fills is not over.
    left = ledger.groups.queued.groups + ledger.groups.delivered.groups
    assert len(groups) == ledger.groups.accepted.groups - left
    assert all(each[2] == list(rewards_of(each[0])) for each in groups)
    assert {"trained", "filtered", "rejected"} <= {each[3] for each in heard}
    assert all(is_kept(each[0]) == (each[3] == "trained") for each in heard if each[3] in ("trained", "rejected"))
    assert (position.reported, ledger.balanced) != ("", False)
