"""A run under full load: tasks fed, leased and pushed by workers with simulated samples, trained and checkpointed.

Workers, feeder and trainer are threads of this process. A call moves many groups, so that the service is at work.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rollout_buffer.v1 import groups_pb2, tasks_pb2
from tests.support.rpc import RunRpc, connect, make_group, make_task, version
from trainer_client import BufferClient, ClientOptions, Environment, Policy

BUNDLE_BYTES = 4 << 20
TASKS_OF_SUBMIT = 256
WORKERS = 3
PULL_TIMEOUT_S = 120.0
RETURNED, EQUAL, STALE = 0.02, 0.05, 0.02
"""Shares of leases that are handed back, of groups that the filter ends, and of those that are recycled."""
PUSHED = (groups_pb2.PUSH_OUTCOME_QUEUED, groups_pb2.PUSH_OUTCOME_FILTERED)


@dataclass(frozen=True)
class Load:
    """Number and size of groups; `lengths` are tokens of each sample, of 9 bytes."""

    groups: int
    lengths: tuple[int, ...]
    batch_groups: int

    @property
    def group_bytes(self) -> int:
        """Bytes of a group's payload."""
        return 9 * sum(self.lengths)

    @property
    def bundle(self) -> int:
        """Groups of one message."""
        return max(1, min(self.batch_groups, BUNDLE_BYTES // self.group_bytes))

    def policy(self, **more: object) -> Policy:
        """Return a policy with what goes together of all that a run can have, but stages."""
        fields: dict[str, object] = {
            "batch_groups": self.batch_groups,
            "max_queued_groups": 4 * self.batch_groups,
            "overflow_action": "block",
            "environments": {
                "math": Environment(share=3, starts_per_minute=1_000_000, start_burst=1_000),
                "code": Environment(share=1, priority=7),
            },
            "max_staleness": 8,
            "stale_action": "recycle",
            "filter_equal_rewards": True,
            "max_uses": 2,
            "reuse_share_milli": 250,
            "reuse_max_staleness": 8,
            "cancel_stale_leases": True,
            "target_staleness_milli": 2_000,
            "longest_first": True,
            "max_lookahead": 8,
            "max_pending_tasks": 8 * TASKS_OF_SUBMIT,
            "max_attempts": 100,
            "retry_backoff_ms": 1,
            "record_groups": True,
        }
        return Policy(**{**fields, **more})  # type: ignore[arg-type]


@dataclass
class Loop:
    """One run, from its first task to its last group."""

    address: str
    run_id: str
    load: Load
    seed: int
    tell: Callable[[int], None]
    """Told of every group that was accepted."""
    accepted: int = 0
    trained: int = 0
    published: int = 0
    failures: list[BaseException] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _full: threading.Event = field(default_factory=threading.Event)
    _over: threading.Event = field(default_factory=threading.Event)

    def run(self, policy: Policy) -> None:
        """Make the run and train it on; the last groups that fill no batch stay queued. Raises what a thread raised."""
        with BufferClient(self.address, ClientOptions(timeout_s=60)) as client:
            client.create_run(self.run_id, policy)
            with self._threads():
                self._train(client)
        if self.failures:
            raise self.failures[0]

    @contextmanager
    def _threads(self) -> Iterator[None]:
        works = [self._feed, *(lambda number=number: self._work(number) for number in range(WORKERS))]
        threads = [threading.Thread(target=self._guarded, args=(work,), daemon=True) for work in works]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join(PULL_TIMEOUT_S)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the trainer ends with it
            self.failures.append(error)
            self._over.set()

    def _train(self, client: BufferClient) -> None:
        step = 0
        while not self._over.is_set() and not (self._full.is_set() and self._queued(client) < self.load.batch_groups):
            done = step - 1 if step else None
            batch = client.pull(
                self.run_id, term=1, step=step, commit_through=done, checkpoint_through=done, timeout_s=PULL_TIMEOUT_S
            )
            self.trained += len(batch.groups)
            client.publish(self.run_id, term=1, version=step + 1, commit_through=step)
            self.published = step = step + 1

    def _queued(self, client: BufferClient) -> int:
        return client.ledger(self.run_id).groups.queued.groups

    def _feed(self) -> None:
        run, rng = RunRpc(connect(self.address), self.run_id), random.Random(f"{self.seed} tasks")
        while not self._over.is_set() and not self._full.is_set():
            if run.get().tasks.pending > TASKS_OF_SUBMIT:
                time.sleep(0.02)
                continue
            run.submit(
                [
                    make_task(
                        group_size=len(self.load.lengths),
                        environment=rng.choice(("math", "math", "math", "code")),
                        expected_tokens=rng.randint(8, 4_096),
                    )
                    for _ in range(TASKS_OF_SUBMIT)
                ]
            )

    def _work(self, number: int) -> None:
        run = RunRpc(connect(self.address), self.run_id, worker_id=f"w{number}", instance_id="i")
        rng, heard = random.Random(f"{self.seed} {number}"), 0.0
        rewards = [float(i) for i in range(len(self.load.lengths))]
        different = make_group("", lengths=self.load.lengths, rewards=rewards, seed=number)
        equal = make_group("", lengths=self.load.lengths, seed=number)
        while not self._over.is_set() and not self._full.is_set():
            now = self.published
            if time.monotonic() - heard > 1:
                heard = time.monotonic()
                run.report(f"e{number}", loaded=version(now))
            leases = run.lease(self.load.bundle, 1_000, engine_id=f"e{number}", loaded=version(now)).leases
            back = [lease.lease_id for lease in leases if rng.random() < RETURNED]
            if back:
                self._give_back(run, back)
            groups = [
                _group(
                    equal if rng.random() < EQUAL else different,
                    lease,
                    max(0, now - 20) if rng.random() < STALE else now,
                )
                for lease in leases
                if lease.lease_id not in back
            ]
            if groups:
                self._count(run.push_stream([groups], PULL_TIMEOUT_S)[0].acks)

    def _give_back(self, run: RunRpc, lease_ids: list[str]) -> None:
        request = tasks_pb2.ReturnLeasesRequest(
            run=run.ref,
            worker_id=run.worker_id,
            instance_id=run.instance_id,
            returns=[
                tasks_pb2.LeaseReturn(lease_id=each, kind=tasks_pb2.RETURN_KIND_INTERRUPTED) for each in lease_ids
            ],
        )
        run.rpc.tasks.ReturnLeases(request, timeout=60)

    def _count(self, acks: object) -> None:
        outcomes = [ack.outcome for ack in acks]  # type: ignore[attr-defined]
        taken = sum(outcome in PUSHED for outcome in outcomes)
        with self._lock:
            self.accepted += taken
            if self.accepted >= self.load.groups:
                self._full.set()
        self.tell(taken)


def _group(template: groups_pb2.Group, lease: tasks_pb2.Lease, made_by: int) -> groups_pb2.Group:
    group = groups_pb2.Group()
    group.CopyFrom(template)
    header = group.header
    header.task_id, header.lease_id, header.incarnation = lease.task.task_id, lease.lease_id, lease.incarnation
    header.environment = lease.task.environment
    for sample in header.samples:
        sample.spans[0].version.CopyFrom(version(made_by))
    return group
