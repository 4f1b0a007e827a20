"""Stages whose workers, service and trainer are killed in their middle: nothing is lost, and nothing is added twice."""

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from tests.support.push import Pusher, arrays_for
from tests.support.service import ServiceProcess, running_service
from tests.workers.training import until
from trainer_client import BufferClient, ClientOptions, Policy
from trainer_client.batch import Group

RUN, STAGES, GROUPS, BATCH = "r", ("reference", "values"), 48, 4
OPTIONS = ClientOptions(timeout_s=60)

WORKER = """
import os, signal, sys, time
import numpy as np
from trainer_client.stages import Stage

address, name, die_after = sys.argv[1], sys.argv[2], int(sys.argv[3])
worked = 0

def make(group):
    global worked
    if worked == die_after:
        os.kill(os.getpid(), signal.SIGKILL)
    worked += 1
    time.sleep(0.03)  # The work of a group: whoever is killed beside it mostly meets one.
    return {name: [np.arange(sample.tokens, dtype=np.float32) for sample in group.samples]}

with Stage(address, "r", name, worker_id=name) as stage:
    stage.serve(make)
"""


class Workers:
    """Workers of one stage, one after the other: each dies in the middle of a group, and the next one comes."""

    def __init__(self, address: str, name: str, random_: random.Random) -> None:
        self.deaths = 0
        self._words = [sys.executable, "-c", WORKER, address, name]
        self._random = random_
        self._stopped = threading.Event()
        self._now: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._now = subprocess.Popen([*self._words, str(self._random.randint(4, 12))])
            self.deaths += self._now.wait() == -signal.SIGKILL

    def stop(self) -> None:
        self._stopped.set()
        if self._now is not None:
            self._now.kill()
        self._thread.join()


@contextmanager
def workers(service: ServiceProcess, seed: int) -> Iterator[list[Workers]]:
    with ExitStack() as ending:
        started = [Workers(service.address, name, random.Random(f"{seed} {name}")) for name in STAGES]
        for one in started:
            ending.callback(one.stop)
        yield started


def test_whoever_is_killed_every_group_is_trained_once_with_all_columns(tmp_path: Path) -> None:
    with running_service(tmp_path) as service, BufferClient(service.address, OPTIONS) as client:
        client.create_run(
            RUN,
            Policy(batch_groups=BATCH, max_queued_groups=GROUPS, stages=STAGES, max_attempts=100, lease_ttl_ms=2000),
        )
        with Pusher(service.address, RUN) as pusher:
            pusher.push(*(arrays_for(f"t{i:02d}") for i in range(GROUPS)))
        pushed = client.run(RUN).ledger.groups.accepted.bytes
        trained: list[Group] = []
        term, steps = 1, GROUPS // BATCH
        with workers(service, 0) as started:
            for step in range(steps):
                batch = client.pull(RUN, term=term, step=step, timeout_s=60)
                if step % 5 == 1:
                    if step <= steps // 2:
                        until(lambda: any(one.leased for one in client.run(RUN).stages), "a group of a stage is leased")
                    service.kill()
                    service.start()
                if step % 5 == 3:
                    # The trainer dies before it has published: the next one gets the same step, byte for byte.
                    term = client.resume(RUN).term
                    again = client.pull(RUN, term=term, step=step, timeout_s=60)
                    assert [_bytes(one) for one in again.groups] == [_bytes(one) for one in batch.groups]
                trained += batch.groups
                client.publish(RUN, term=term, version=step + 1, commit_through=step)
            assert all(one.deaths for one in started)
        run = client.run(RUN)
        assert run.ledger.balanced
        assert run.ledger.groups.trained.groups == GROUPS
        # Groups have the bytes of what was pushed, and of what was added, each once.
        assert run.ledger.groups.trained.bytes == pushed + sum(one.added_bytes for one in run.stages)
        assert [(one.added, one.waiting, one.leased) for one in run.stages] == [(GROUPS, 0, 0)] * len(STAGES)
        assert sorted(group.task_id for group in trained) == [f"t{i:02d}" for i in range(GROUPS)]
        for group in trained:
            assert [one.stage for one in group.stages] == list(STAGES)
            for sample in group.samples:
                for name in STAGES:
                    np.testing.assert_array_equal(sample.extras[name], np.arange(sample.tokens))


def _bytes(group: Group) -> list[bytes]:
    return [bytes(group.payload), *(bytes(added.payload) for added in group.stages)]
