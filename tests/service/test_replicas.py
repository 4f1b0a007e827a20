"""Replicas that come and go beside others, under load: their connections spread, and nobody notices."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from bench.balancer import Balancer
from bench.rebalance import Fleet, even_after
from tests.support.service import ServiceProcess
from tests.support.store_server import store_server
from tests.workers.process import worker_process
from trainer_client import BufferClient, ClientOptions, Policy, SamplingParams, Task, TrainerSession

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

WORKERS = 20
AGE_S = 1.0
SPREAD_WITHIN_S = 20.0
"""Longest time until the connections are even, on a busy machine too; it takes two ages."""
BATCH, MORE_STEPS = 2, 3


def in_turn() -> Callable[[Sequence[str]], str]:
    """A pick of one after the other, as IPVS does: what few connections make of it is no chance."""
    turns = itertools.count()
    return lambda backends: backends[next(turns) % len(backends)]


class Upgrade:
    """A second replica that comes, and both replaced after it, as Kubernetes does, in a thread of its own."""

    def __init__(self, balancer: Balancer, replicas: Sequence[ServiceProcess], fleet: Fleet) -> None:
        self.even_after_s: float | None = None
        self.repeats_by_age: list[str] = []
        """Calls of the fleet that were repeated before any replica ended."""
        self.statuses: list[int] = []
        self._balancer, self._replicas, self._fleet = balancer, replicas, fleet
        self._thread = threading.Thread(target=self._upgrade, name="upgrade")

    def start(self) -> None:
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def _upgrade(self) -> None:
        second = self._replicas[1]
        self._come(second)
        self.even_after_s = even_after(self._balancer, second.address, SPREAD_WITHIN_S)
        self.repeats_by_age = list(self._fleet.account.repeats)
        for replica in self._replicas:
            self._balancer.backends.remove(replica.address)
            self.statuses.append(replica.stop())
            self._come(replica)

    def _come(self, replica: ServiceProcess) -> None:
        replica.start()
        self._balancer.backends.append(replica.address)


def end(replicas: Sequence[ServiceProcess]) -> None:
    for replica in replicas:
        if replica.process is not None:
            replica.kill()


def tasks() -> Iterator[Task]:
    sampling = SamplingParams(max_new_tokens=8)
    for number in itertools.count():
        yield Task(task_id=f"t{number}", group_size=2, sampling=sampling, prompt_token_ids=[1, 2])


def trained_meanwhile(session: TrainerSession, upgrade: Upgrade) -> list[str]:
    """Task ids of what was trained until the upgrade was over, and for some steps after."""
    trained: list[str] = []
    left = MORE_STEPS
    for batch in session:
        trained += [group.task_id for group in batch.groups]
        session.publish()
        if batch.step == MORE_STEPS:
            upgrade.start()
        elif batch.step > MORE_STEPS and upgrade.done:
            left -= 1
            if not left:
                break
    return trained


def test_a_replica_comes_and_all_are_replaced_and_neither_workers_nor_trainer_notice(tmp_path: Path) -> None:
    policy = Policy(batch_groups=BATCH, overflow_action="block", lease_ttl_ms=20_000)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(store_server())
        settings = {"rpc_processes": 1, "drain_grace_s": 5, "store": store.url, "connection_age_s": AGE_S}
        replicas = [ServiceProcess(tmp_path / f"replica{i}", settings) for i in range(2)]
        replicas[0].start()
        stack.callback(end, replicas)
        balancer = stack.enter_context(Balancer([replicas[0].address], in_turn()))
        client = stack.enter_context(BufferClient(balancer.address, ClientOptions(timeout_s=60)))
        client.create_run("pushed", Policy(batch_groups=1_000, max_queued_groups=1_000_000))
        fleet = stack.enter_context(Fleet(balancer.address, "pushed", WORKERS, push_every_s=0.2))
        flags = ("--simulate", "--engines", "2", "--groups-per-engine", "2")
        worker = stack.enter_context(worker_process(balancer.address, "r", tmp_path / "worker", *flags))
        upgrade = Upgrade(balancer, replicas, fleet)
        with client.session("r", policy=policy, tasks=tasks()) as session:
            trained = trained_meanwhile(session, upgrade)
            run = session.state()
        assert worker.stop() == 0
        fleet.stop()
        pushed = client.run("pushed").ledger.groups.accepted.groups
    assert upgrade.even_after_s is not None
    assert upgrade.repeats_by_age == []
    assert upgrade.statuses == [0, 0]
    assert len(trained) == len(set(trained)) == run.ledger.groups.trained.groups
    assert run.ledger.balanced
    assert run.ledger.tasks.failed == 0
    assert "[error" not in worker.said()
    # Those that were pushed again when a replica ended are known.
    assert pushed == fleet.account.pushed > WORKERS
