"""The state of one run, and the few changes of state that every operation is made of.

Invariants: tasks and groups change state only through `move_task` and `move_group`, which ask the transition tables;
whatever changes the run sets `changed`, and `settle` then raises the revision, once per operation.
"""

from collections import deque
from dataclasses import dataclass, field

from buffer_service.domain.failures import over_budget
from buffer_service.domain.identity import group_id
from buffer_service.domain.ledger import GroupLedger, TaskLedger
from buffer_service.domain.model.leases import LeaseBook
from buffer_service.domain.model.pending import PendingTasks
from buffer_service.domain.model.queue import GroupQueue
from buffer_service.domain.model.records import Group, Payloads, PublishedAt, Step, Task
from buffer_service.domain.ops import (
    EngineReport,
    GroupFacts,
    Resumed,
    Submitted,
    TaskFailure,
    WeightVersion,
)
from buffer_service.domain.policy import RunPolicy
from buffer_service.domain.timeline import Timeline, next_train_version
from buffer_service.domain.transitions import GroupState, TaskState
from buffer_wire.errors import FailureBudgetExceeded, RunPaused, StaleEpoch

STORE_ROLLED_BACK = "store_rolled_back"
FAILURE_BUDGET_EXCEEDED = "failure_budget_exceeded"

FAILURES_SHOWN = 100

STATISTICS = (
    "leases_granted",
    "leases_expired",
    "leases_returned",
    "pushes_duplicate",
    "pushes_closed",
    "pushes_rejected",
    "staleness_sum",
    "pre_queue_staleness_sum",
    "in_queue_staleness_sum",
    "staleness_max",
    "assembled_groups",
    "continuation_tokens_discarded",
    "assembled_groups_spanning_versions",
)


@dataclass(slots=True, eq=False)
class RunState:
    """Everything that is known of a run."""

    run_id: str
    policy: RunPolicy
    created_ms: int
    now: int
    """Time of the present operation, ms; never goes back."""
    revision: int = 1
    changed: bool = False
    seen_revision: int = 0
    """Highest revision that a caller has seen of a store that was rolled back."""
    paused: str = ""

    epoch: int = 1
    published: WeightVersion = WeightVersion(epoch=1, version=0)  # noqa: RUF009 (frozen)
    manifest: bytes = b""
    publishes: list[PublishedAt] = field(default_factory=list)
    """In order of committed_steps, one entry for each."""
    timeline: Timeline = field(default_factory=Timeline)

    next_step: int = 0
    committed_steps: int = 0
    checkpointed_steps: int = 0
    published_steps: int = 0
    """committed_steps as of the last publish."""
    assembled_now: int = 0
    """Groups of the steps below next_step."""
    world_size: int = 0
    steps: dict[int, Step] = field(default_factory=dict)

    cursor: int = 0
    feeder_state: bytes = b""
    sequence: int = 0
    last_submit: tuple[str, Submitted] | None = None
    last_resume: tuple[str, Resumed] | None = None

    tasks: dict[str, Task] = field(default_factory=dict)
    pending: PendingTasks = field(default_factory=PendingTasks)
    leases: LeaseBook = field(default_factory=LeaseBook)
    queue: GroupQueue = field(default_factory=GroupQueue)
    payloads: Payloads = field(default_factory=Payloads)
    ended: dict[str, Task] = field(default_factory=dict)
    """Tombstones that no retained step keeps: they go with the next checkpoint."""

    group_ledger: GroupLedger = field(default_factory=GroupLedger)
    task_ledger: TaskLedger = field(default_factory=TaskLedger)
    statistics: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STATISTICS, 0))
    failures: deque[TaskFailure] = field(default_factory=lambda: deque(maxlen=FAILURES_SHOWN))
    """The newest last."""
    engines: dict[str, EngineReport] = field(default_factory=dict)

    # ── bookkeeping ──

    def settle(self) -> int:
        """The operation's reply is made: its revision."""
        if self.changed:
            self.revision += 1
            self.changed = False
        return self.revision

    def count(self, statistic: str, amount: int = 1) -> None:
        """Raise a counter."""
        self.statistics[statistic] += amount
        self.changed = True

    def next_sequence(self) -> int:
        """A sequence number of its own, from 1."""
        self.sequence += 1
        return self.sequence

    # ── checks that operations share ──

    def require_epoch(self, epoch: int) -> None:
        """Refuse a trainer that was superseded."""
        if epoch != self.epoch:
            raise StaleEpoch(epoch, self.epoch)

    def require_store(self) -> None:
        """Refuse while acknowledged writes are known to be lost."""
        if self.paused == STORE_ROLLED_BACK:
            raise RunPaused(self.run_id, self.paused)

    def require_running(self) -> None:
        """Refuse work for the trainer while the run is paused."""
        self.require_store()
        if self.paused == FAILURE_BUDGET_EXCEEDED:
            failed = self.task_ledger.states[TaskState.FAILED]
            raise FailureBudgetExceeded(failed, self.policy.failure_budget, self.failures[-1].error)

    def check_failure_budget(self) -> None:
        """Pause, or go on, as the failed tasks and the budget say; a rolled back store outranks both."""
        if self.paused != STORE_ROLLED_BACK:
            failed = self.task_ledger.states[TaskState.FAILED]
            self.paused = FAILURE_BUDGET_EXCEEDED if over_budget(self.policy, failed) else ""

    # ── clock ──

    @property
    def train_version(self) -> int:
        """Estimate of the version that will train on the next unassembled step."""
        unpublished = self.next_step - self.published_steps
        return next_train_version(self.published.version, unpublished, self.policy.batches_per_publish)

    # ── tasks ──

    def move_task(self, task: Task, target: TaskState) -> None:
        """The only way in which a task changes state."""
        self.task_ledger.move(task.task_id, task.state, target)
        task.state = target
        self.changed = True

    def make_pending(self, task: Task, not_before: int) -> None:
        """A task is submitted, or comes back."""
        self.leases.close(task)
        task.not_before = not_before
        self.move_task(task, TaskState.PENDING)
        self.pending.add(task)

    def start_anew(self, task: Task) -> None:
        """A task whose group is gone is generated again from nothing, as the next generation."""
        task.generation += 1
        task.attempt = 0
        task.failures = 0
        task.accepted_attempt = None
        task.came_back = True
        self.make_pending(task, self.now)

    # ── groups ──

    def move_group(self, group: Group, target: GroupState) -> None:
        """The only way in which a group changes state."""
        self.group_ledger.move(group.group_id, group.amount, group.state, target)
        group.state = target
        self.changed = True

    def enqueue(self, group: Group) -> None:
        """A group is accepted, or comes back from a batch."""
        self.move_group(group, GroupState.QUEUED)
        self.queue.add(group)

    def dequeue(self, group: Group, target: GroupState) -> None:
        """A group leaves the queue."""
        self.queue.remove(group)
        self.move_group(group, target)

    def end_group(self, group: Group) -> None:
        """A group that moved to a state without exit: its payload goes; its task starts anew or keeps a tombstone."""
        self.payloads.trash(group.payload_key)
        if group.state in {GroupState.RECYCLED, GroupState.LOST} and not group.task.leaseless:
            self.start_anew(group.task)
        else:
            self.ended[group.task.task_id] = group.task

    def drop_oldest(self) -> None:
        """The oldest queued group makes room."""
        group = self.queue.oldest()
        if group is not None:
            self.dequeue(group, GroupState.DROPPED_OVERFLOW)
            self.end_group(group)

    def new_group(self, task: Task, facts: GroupFacts, payload_key: str) -> Group:
        """A group that is about to be accepted, its versions as of now."""
        return Group(
            group_id=group_id(task.task_id, task.generation),
            facts=facts,
            task=task,
            sequence=self.next_sequence(),
            head=self.timeline.effective(facts.head),
            tail=self.timeline.effective(facts.tail),
            payload_key=payload_key,
        )
