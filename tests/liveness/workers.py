"""Workers of a simulated run: each leases, generates, pushes and reloads in its own way, some of them badly.

What a worker does follows the real one: it reports every lease, heartbeats while it generates or waits for an answer,
and tries a rejected group again. What the store lost it writes again. It hands back what it could not finish, and
forgets leases that are lost or cancelled. A blocked push is tried again by the service, which gives it up when the
worker's stream is gone.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from buffer_service.domain import ops
from buffer_wire.payloads.keys import NONCE_BYTES
from tests.liveness.simulation import RUN, Simulation

NOTHING_LOADED = ops.WeightVersion(1, 0)
TICK_MS = 60
HEARTBEAT_MS = 300
RETRY_BLOCKED_MS = 40
RETRY_REJECTED_MS = 120
MEAN_MS = 120
LONGEST_RESPONSE = 40
LARGEST_GROUP = 2 * (LONGEST_RESPONSE + 1)
"""Tokens of the largest group, prompts included."""


@dataclass(frozen=True)
class Temper:
    """Traits of a worker. Probabilities are in per cent of the groups that it generates."""

    slots: int = 2
    slowness: int = 1
    fails: int = 0
    is_interrupted: int = 0
    groups_before_death: int = 0
    """0: it never dies."""
    dead_ms: int = 1_500
    reload_ms: int = 30


TEMPERS = {
    "steady": Temper(),
    "slow": Temper(slots=1, slowness=8),
    "failing": Temper(fails=40, is_interrupted=25),
    "dying": Temper(groups_before_death=3),
    "laggard": Temper(slots=2, reload_ms=900),
}


@dataclass
class Job:
    """A group that is being generated, or waits for its answer."""

    grant: ops.LeaseGrant
    head: ops.WeightVersion
    facts: ops.GroupFacts | None = None
    group: ops.NewGroup | None = None
    """The group as it is pushed."""
    payload_key: str = ""


@dataclass
class SimulatedWorker:
    """One worker with one engine."""

    simulation: Simulation
    name: str
    temper: Temper
    loaded: ops.WeightVersion = NOTHING_LOADED
    published: ops.WeightVersion = NOTHING_LOADED
    jobs: dict[str, Job] = field(default_factory=dict)
    lives: int = 1
    is_loading: bool = False
    heartbeat_due: int = 0
    done: int = 0

    def __post_init__(self) -> None:
        self._again(self.simulation.random.randrange(TICK_MS), self._tick)

    @property
    def instance(self) -> str:
        return f"{self.name}-{self.lives}"

    def _again(self, delay_ms: int, happen: Callable[[], None]) -> None:
        """Later, if this process is still alive then."""
        life = self.lives
        self.simulation.at(delay_ms, lambda: happen() if life == self.lives else None)

    def _tick(self) -> None:
        self._again(TICK_MS, self._tick)
        if self.jobs and self.simulation.now >= self.heartbeat_due:
            self._heartbeat()
        if self.loaded != self.published and not self.is_loading:
            self.is_loading = True
            self._again(self.temper.reload_ms, self._load)
        if len(self.jobs) < self.temper.slots:
            self._lease(self.temper.slots - len(self.jobs))

    def _load(self) -> None:
        self.is_loading = False
        self.loaded = self.published

    def _heartbeat(self) -> None:
        self.heartbeat_due = self.simulation.now + HEARTBEAT_MS
        lease_ids = list(self.jobs)
        states = self.simulation.model.extend(RUN, self.name, self.instance, lease_ids).states
        for lease_id, state in zip(lease_ids, states, strict=True):
            if state is not ops.LeaseState.LIVE and not self.jobs[lease_id].payload_key:
                del self.jobs[lease_id]

    def _lease(self, count: int) -> None:
        simulation = self.simulation
        simulation.feed()
        ask = ops.LeaseAsk(self.name, self.instance, simulation.request_id(), self.name, self.loaded, count)
        leased = simulation.model.lease(RUN, ask)
        self.published = max(self.published, leased.published)
        for grant in leased.grants:
            head = self.loaded
            if grant.partial_rollout:
                head = min(head, ops.WeightVersion(*struct.unpack("<2I", grant.partial_rollout)))
            self.jobs[grant.lease_id] = Job(grant, head)
            took_ms = simulation.random.expovariate(1 / (MEAN_MS * self.temper.slowness))
            self._again(round(took_ms) + 5, lambda lease_id=grant.lease_id: self._generated(lease_id))  # type: ignore[misc]

    def _generated(self, lease_id: str) -> None:
        job = self.jobs.get(lease_id)
        if job is None:
            return
        self.done += 1
        if 0 < self.temper.groups_before_death <= self.done:
            self._die()
            return
        chance = self.simulation.random.randrange(100)
        if chance < self.temper.fails:
            self._give_back(job, ops.ReturnKind.FAILED, "the engine failed")
        elif chance < self.temper.fails + self.temper.is_interrupted:
            self._give_back(job, ops.ReturnKind.INTERRUPTED, "")
        else:
            job.facts = self._facts(job)
            self._write(job)

    def _die(self) -> None:
        """Without a word: leases run out unless another process of the same name comes; blocked pushes end."""
        parked = [job.payload_key for job in self.jobs.values() if job.payload_key]
        self.simulation.model.abandon_push(RUN, parked)
        self.jobs.clear()
        self.done = 0
        self.lives += 1
        self.is_loading = False
        self._again(self.temper.dead_ms, self._tick)

    def _give_back(self, job: Job, kind: ops.ReturnKind, error: str) -> None:
        del self.jobs[job.grant.lease_id]
        kept = struct.pack("<2I", job.head.term, job.head.version)
        given = ops.LeaseReturn(job.grant.lease_id, kind, error, kept, job.head, 5)
        self.simulation.model.give_back(RUN, self.name, self.instance, [given])

    def _facts(self, job: Job) -> ops.GroupFacts:
        random = self.simulation.random
        lengths = [random.randint(1, LONGEST_RESPONSE) for _ in range(2)]
        rewards = [random.randrange(0, 2) for _ in range(2)]
        tail = max(job.head, self.loaded)
        grant = job.grant
        number = int(grant.task_id.rpartition("-")[2])
        environments = self.simulation.environments
        return ops.GroupFacts(
            task_id=grant.task_id,
            incarnation=grant.incarnation,
            lease_id=grant.lease_id,
            environment=environments[number % len(environments)],
            samples=2,
            tokens=sum(lengths) + 2,
            loss_tokens=sum(lengths),
            size_bytes=1_000 + 4 * sum(lengths),
            head=job.head,
            tail=tail,
            spans_versions=tail != job.head,
            mean_milli=500 * (job.head.version + tail.version),
            equal_rewards=rewards[0] == rewards[1],
            mean_reward_milli=500 * sum(rewards),
            response_lengths=struct.pack("<2I", *lengths),
            rewards=struct.pack("<2f", *rewards),
            min_response_tokens=min(lengths),
            max_response_tokens=max(lengths),
            response_tokens=sum(lengths),
            reward_milli=1_000 * sum(rewards),
            turns=2,
            truncated_samples=0,
        )

    def _write(self, job: Job) -> None:
        """Every third group is written to the store, where every tenth is lost."""
        random = self.simulation.random
        if job.facts is None or job.grant.lease_id not in self.jobs:
            return
        if random.randrange(3):
            job.facts = replace(job.facts, stored=False)
            job.group = ops.NewGroup(job.facts, b"body")
        else:
            job.facts = replace(job.facts, stored=True)
            job.group = ops.NewGroup(job.facts, bytes(job.facts.size_bytes), nonce=random.randbytes(NONCE_BYTES))
            if random.randrange(10):
                self.simulation.model.write(RUN, job.group)
        self._push(job)

    def _push(self, job: Job) -> None:
        if job.group is not None and job.grant.lease_id in self.jobs:
            self._answered(job, self.simulation.model.push(RUN, [job.group]))

    def _retry(self, job: Job) -> None:
        if job.facts is not None:
            self._answered(job, self.simulation.model.retry_push(RUN, [(job.facts, job.payload_key)]))

    def _answered(self, job: Job, result: ops.PushResult) -> None:
        self.published = max(self.published, result.published)
        (pushed,) = result.outcomes
        job.payload_key = pushed.payload_key
        if pushed.kind is ops.PushKind.BLOCKED:
            self._again(RETRY_BLOCKED_MS, lambda: self._retry(job))
        elif pushed.kind is ops.PushKind.PAYLOAD_MISSING:
            self._again(RETRY_REJECTED_MS, lambda: self._write(job))
        elif pushed.kind is ops.PushKind.REJECTED_FULL:
            self._again(RETRY_REJECTED_MS, lambda: self._push(job))
        else:
            assert pushed.kind is not ops.PushKind.INVALID, pushed
            del self.jobs[job.grant.lease_id]
