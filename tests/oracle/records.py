"""Parts of a run: tasks, leases, groups, workers, publishes, payloads.

Invariants: a task has a lease exactly while it is leased, and an accepted attempt exactly while it is completed;
versions of groups, leases and partial rollouts are those of the present timeline.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from buffer_service.domain.gate import MILLI, age_milli
from buffer_service.domain.ops import Amount, Buffer, GroupFacts
from buffer_service.domain.policy import StalenessMeasure
from buffer_service.rules.transitions import NEW, TaskState
from tests.oracle.rules.identity import LeaseId

if TYPE_CHECKING:
    from tests.oracle.evaluation_book import Task as EvaluationTask

_written = count(1)


@dataclass(frozen=True, slots=True)
class PartialRollout:
    """Work that an interrupted attempt left behind; head None: no tokens yet."""

    body: bytes
    head: int | None
    tokens: int

    def clamped(self, version: int) -> "PartialRollout":
        """Make the same in a timeline that forked at `version`."""
        return self if self.head is None else PartialRollout(self.body, min(self.head, version), self.tokens)


@dataclass(frozen=True, slots=True)
class Lease:
    """Worker that generates a task, and until when (ms, inclusive)."""

    worker_id: str
    instance_id: str
    expiry: int


@dataclass(slots=True, eq=False)
class Task:
    """A prompt on its way to a group. `leaseless` tasks were made by a push and cannot be started anew."""

    task_id: str
    sequence: int
    priority: int = 0
    awaited: int | None = None
    """Oldest version of its lease, where batches wait for that."""
    turn: int | None = None
    """Sequence that its group is to have, in the order of submission that of its first lease."""
    holds_window: bool = False
    """True while batches wait for its lease by its turn."""
    environment: str = ""
    spec: bytes = b""
    leaseless: bool = False
    state: str = NEW
    incarnation: int = 0
    attempt: int = 0
    failures: int = 0
    came_back: bool = False
    """It was leased or completed before; such tasks go ahead of fresh ones."""
    not_before: int = 0
    """Earliest time of the next lease, ms."""
    partial_rollout: PartialRollout | None = None
    lease: Lease | None = None
    lease_head: int = 0
    """While leased: the oldest version that its group can have tokens of."""
    granted_ms: int = 0
    """Time when its last lease was given."""
    accepted_attempt: int | None = None
    """The attempt whose group was accepted for this incarnation; 0 without a lease."""
    accepted_key: str = ""
    """Payload key of that group."""
    filtered: bool = False
    """True when the filter ended that group."""
    added: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Columns that stages have added to that group: number of the lease and payload key, by stage."""

    @property
    def lease_id(self) -> str:
        """Id of the present, or last, lease."""
        return str(LeaseId(self.task_id, self.incarnation, self.attempt))

    @property
    def is_open(self) -> bool:
        """Tell whether a result for its incarnation would be accepted."""
        return self.state in {TaskState.PENDING, TaskState.LEASED}

    def clamp(self, version: int) -> None:
        """The timeline forked at `version`: nothing newer exists any more."""
        self.lease_head = min(self.lease_head, version)
        if self.partial_rollout is not None:
            self.partial_rollout = self.partial_rollout.clamped(version)


@dataclass(slots=True, eq=False)
class Hold:
    """Lease of a group by a worker of the stage that it is in: its number, and until when (ms, inclusive)."""

    number: int
    worker_id: str
    instance_id: str
    granted: int
    expiry: int


@dataclass(slots=True)
class StageNote:
    """Account of a stage: what it has done so far, and when a worker of it asked last (ms)."""

    added: int = 0
    failed: int = 0
    busy_ms: int = 0
    asked: int | None = None
    passed_over: int = 0
    added_bytes: int = 0


@dataclass(slots=True, eq=False)
class Group:
    """An accepted group; its versions in the present timeline, payload known by its key."""

    group_id: str
    facts: GroupFacts
    task: Task
    sequence: int
    head: int
    tail: int
    mean_milli: int
    version_tokens: Sequence[tuple[int, int]]
    """Version tokens as in GroupFacts, of the timeline in which the group was accepted."""
    payload_key: str
    state: str = NEW
    stage: str = ""
    """Stage in which it waits, or is held; empty: batches may take it."""
    hold: Hold | None = None
    tries: int = 0
    """Leases of its stage that failed."""
    added: list[tuple[str, str]] = field(default_factory=list)
    """Stages that have added something to it, each with the payload key."""

    @property
    def payload_keys(self) -> list[str]:
        """Keys of all its payloads."""
        return [self.payload_key, *(key for _, key in self.added)]

    @property
    def amount(self) -> Amount:
        """Its entry in the ledger."""
        facts = self.facts
        return Amount(groups=1, samples=facts.samples, tokens=facts.tokens, bytes=facts.size_bytes)

    @property
    def environment(self) -> str:
        """Name of the environment in which it counts."""
        return self.facts.environment

    def age_milli(self, measure: StalenessMeasure) -> int:
        """The version by which it is measured, in milli-versions."""
        return age_milli(measure, head=self.head, tail=self.tail, mean_milli=self.mean_milli)

    def tokens_behind(self, train_version: int) -> Iterator[tuple[int, int]]:
        """Response tokens by staleness: (whole versions behind `train_version`, tokens)."""
        if not self.version_tokens:
            yield max(0, train_version * MILLI - self.mean_milli) // MILLI, self.facts.response_tokens
            return
        for version, tokens in self.version_tokens:
            yield max(0, train_version - min(version, self.tail)), tokens
        of_tail = self.facts.response_tokens - sum(tokens for _, tokens in self.version_tokens)
        yield max(0, train_version - self.tail), of_tail

    def clamp(self, version: int) -> None:
        """The timeline forked at `version`: nothing newer exists any more."""
        self.head = min(self.head, version)
        self.tail = min(self.tail, version)
        self.mean_milli = min(self.mean_milli, version * MILLI)


@dataclass(slots=True, eq=False)
class Kept:
    """A trained group that may be used again, or is."""

    group: Group
    origin: int
    """Its own step."""
    uses: int = 1
    holders: set[int] = field(default_factory=set)
    """Steps that have it, and are not freed."""
    pooled: bool = False
    """It may be drawn."""
    spent: bool = False
    """It never may be again."""
    orphan: bool = False
    """Its task is not its any more."""


@dataclass(slots=True, eq=False)
class Worker:
    """A worker's process, the leases it holds, and its last request that was given leases."""

    instance_id: str
    heard_ms: int = 0
    """Time when it asked for leases last."""
    leased: dict[str, Task] = field(default_factory=dict)
    request_id: str = ""
    granted: list[tuple[Task, str]] = field(default_factory=list)
    """The leases of that request: task and lease id."""
    evaluating: list["EvaluationTask"] = field(default_factory=list)
    """Leased tasks of evaluations."""
    evaluation_request_id: str = ""
    evaluation_leases: list[str] = field(default_factory=list)
    """Lease ids of its last request for evaluations that was given any."""


@dataclass(frozen=True, slots=True)
class PublishedAt:
    """A publish, at the number of committed steps that its weights include."""

    committed_steps: int
    version: int
    manifest: bytes


@dataclass(slots=True)
class Payloads:
    """Bodies by key: written before they are indexed, deleted when nothing refers to them any more.

    They are those of a run's name, over deletions of the run: what was written and not pushed outlives one.
    """

    bodies: dict[str, Buffer] = field(default_factory=dict)
    expiring: set[str] = field(default_factory=set)
    """Keys of what their pushers have written, and no group has."""

    def put(self, body: Buffer) -> str:
        """Store a body under a key of its own, which no other run has or had either."""
        key = f"payload-{next(_written)}"
        self.bodies[key] = body
        return key

    def write(self, key: str, body: Buffer) -> None:
        """A pusher writes a body; a repeat changes nothing."""
        if key not in self.bodies:
            self.bodies[key] = body
            self.expiring.add(key)

    def is_free(self, key: str, size: int) -> bool:
        """Tell whether a body of this size was written under the key, and no group has it."""
        return key in self.expiring and len(self.bodies[key]) == size

    def claim(self, key: str) -> None:
        """A written body stays."""
        self.expiring.discard(key)

    def release(self, key: str) -> None:
        """A written body expires after all."""
        self.expiring.add(key)

    def expire(self) -> None:
        """Time is over for what was written and not pushed."""
        for key in list(self.expiring):
            self.trash(key)

    def keep_expiring(self) -> None:
        """The run is deleted, with all bodies that it had."""
        self.bodies = {key: self.bodies[key] for key in self.expiring}

    def trash(self, key: str) -> None:
        """Nothing refers to the body any more."""
        self.bodies.pop(key, None)
        self.expiring.discard(key)
