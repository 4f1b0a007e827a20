"""A run as it is looked at: its whole state, and the records of its history."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from buffer_service.domain.ops.payloads import RelayingClient
from buffer_service.domain.ops.weights import EngineReport, WeightVersion
from buffer_service.domain.policy import RunPolicy
from buffer_service.domain.steering.decisions import NO_DECISION, Decision
from buffer_service.domain.steering.knobs import in_effect
from buffer_service.domain.window import Window, no_staleness
from buffer_service.rules.totals import RELOAD_PHASES


@dataclass(frozen=True, slots=True)
class Amount:
    """Sizes of a set of groups."""

    groups: int = 0
    samples: int = 0
    tokens: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """An event of a run's recording: `data` is packed, its fields are named in docs/recording.md."""

    event_id: str
    kind: str
    data: bytes


@dataclass(frozen=True, slots=True)
class TaskFailure:
    """A task that failed for good."""

    task_id: str
    attempts: int
    error: str
    time_ms: int


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """Facts that a primary of the payload store gives of itself at `server`, host:port; None: it does not answer."""

    server: str
    memory_used_bytes: int | None
    memory_limit_bytes: int | None


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """Facts that the store's server gives of itself; a `memory_limit_bytes` of 0: none."""

    memory_used_bytes: int
    memory_limit_bytes: int
    clients: int
    payload_shards: Sequence[ShardFacts] = ()
    """Primaries of the cluster that payloads lie on, where there is one."""


@dataclass(frozen=True, slots=True)
class StageState:
    """State of a stage: groups that wait in it and that its workers hold, and what it has done so far."""

    name: str
    waiting: int
    leased: int
    added: int
    """Groups that it has added columns to."""
    failed: int
    """Leases that failed or expired."""
    busy_ms: int
    """Time from lease to columns, in ms, summed over those groups."""
    asked_ms: int | None
    """Time since a worker of it asked, in ms; None: none ever has."""
    passed_over: int = 0
    """Groups that left it without columns, since the policy named it no more."""
    added_bytes: int = 0
    """Bytes of the columns that it has added."""


@dataclass(frozen=True, slots=True)
class ReuseLedger:
    """Uses of groups beyond their own steps: drawn = delivered + trained + given_back + lost."""

    reusable_groups: int = 0
    """Trained groups that may be used again."""
    drawn: int = 0
    delivered: int = 0
    trained: int = 0
    given_back: int = 0
    lost: int = 0

    @property
    def balanced(self) -> bool:
        """True where every use that was drawn is somewhere."""
        return self.drawn == self.delivered + self.trained + self.given_back + self.lost


@dataclass(frozen=True, slots=True)
class EnvironmentWork:
    """Work on the tasks of one environment so far, without evaluations."""

    environment: str
    starts: int
    """Leases given."""
    failed_attempts: int
    """Leases that ended in an error, or expired."""
    failed_tasks: int
    failed_samples: int
    """Samples of accepted groups with a named failure."""
    limited_for_ms: int
    """Time until its starts_per_minute allow the next lease; 0: now."""


@dataclass(frozen=True, slots=True)
class RunView:
    """The whole state of a run.

    `groups` maps `accepted` and every GroupState to its Amount, `tasks` maps `submitted` and every TaskState to a
    count. Queued, forming, delivered, pending and leased are counted from what exists. `environments` has the same
    Amounts for each environment of an accepted group. `statistics` has the fields of the wire's RunStatistics, among
    them those of totals.TOTALS.
    """

    run_id: str
    policy: RunPolicy
    revision: int
    created_ms: int
    term: int
    published: WeightVersion
    next_step: int
    committed_steps: int
    published_steps: int
    """Steps below this one are in the published weights, as far as the service can know."""
    checkpointed_steps: int
    world_size: int
    cursor: int
    paused: str
    draining: bool
    groups: dict[str, Amount]
    environments: dict[str, dict[str, Amount]]
    tasks: dict[str, int]
    statistics: dict[str, int]
    engines: Sequence[EngineReport]
    failures: Sequence[TaskFailure]
    window: Window | None = None
    """Window between the oldest and the newest publish that are kept; None before the second one."""
    response_lengths: Sequence[int] = ()
    """Accepted samples by response length, LENGTH_BUCKETS counts."""
    staleness_counts: Mapping[str, Sequence[int]] = field(default_factory=no_staleness)
    """Groups and tokens of assembled steps by bucket of staleness (totals.STALENESS_BOUNDS), for each of
    totals.STALENESS_COUNTED."""
    reload_counters: Sequence[int] = (0,) * (2 * len(RELOAD_PHASES))
    """Counters of all engines' reloads, as totals.RELOAD_PHASES says."""
    relaying: Sequence[RelayingClient] = ()
    """Clients that relay payloads although they asked for access to the store, by id."""
    decision: Decision = NO_DECISION
    """Last decision of the controller, which holds a target of staleness."""
    awaited: int = 0
    """Groups in flight that the last pull waited for although enough were queued; 0 after AWAITED_MS."""
    awaited_task: str = ""
    """The task among them that began first, where it waited by the order of submission; else empty."""
    stages: Sequence[StageState] = ()
    """Stages of the policy in their order, then those that are named no more while groups are in them."""
    reuse: ReuseLedger = ReuseLedger()
    missing_groups: int = 0
    """Groups that complete steps, which are not committed, are still to get for rejected ones."""
    environment_work: Sequence[EnvironmentWork] = ()
    """Work on tasks by environment, in order of name."""
    payload_shards: int = 0
    """Shards of the cluster on which payloads lie; 0: they lie beside what decides."""
    environment_statistics: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Statistics of each environment of an accepted group.

    These are `assembled_groups`, the totals of STALENESS, `accepted_response_tokens` and `assembled_response_tokens`.
    """
    blob_bytes: int = 0
    """Bytes of the run's blobs."""
    max_blob_bytes: int = 0
    """Bytes that they may have together; 0: an older service does not say."""

    @property
    def in_effect(self) -> RunPolicy:
        """The policy with what a controller lowered."""
        return in_effect(self.policy, self.decision.knobs, self.world_size)
