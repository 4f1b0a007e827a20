"""The state of one run, and the few changes of state that every operation is made of.

Invariants: tasks and groups change state only through `move_task` and `move_group`, which ask the transition tables;
whatever changes the run sets `changed`, and `settle` then raises the revision, once per operation.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from functools import cache

from buffer_service.domain.ops import (
    Amount,
    GroupFacts,
    PlanCollective,
    Resumed,
    Submitted,
    TaskFailure,
    WeightVersion,
    groups,
)
from buffer_service.domain.policy import MAX_ENVIRONMENTS, Order, RunPolicy, StaleAction
from buffer_service.domain.steering.decisions import NO_DECISION, Decision
from buffer_service.domain.steering.knobs import in_effect
from buffer_service.domain.timeline import next_train_version
from buffer_service.rules.pauses import Pause
from buffer_service.rules.statistics import STATISTICS
from buffer_service.rules.transitions import NEW, GroupState, TaskState
from buffer_wire.errors import FailureBudgetExceeded, RunPaused, StaleTerm
from buffer_wire.revision import NO_REVISION, Revision
from tests.oracle.engines import Engines
from tests.oracle.evaluation_book import Book
from tests.oracle.leases import LeaseBook
from tests.oracle.line import PushLine
from tests.oracle.pending import PendingTasks
from tests.oracle.queue import GroupQueue
from tests.oracle.records import Group, Hold, Kept, Payloads, PublishedAt, StageNote, Task
from tests.oracle.rules.failures import over_budget
from tests.oracle.rules.identity import group_id
from tests.oracle.rules.ledger import GroupLedger, TaskLedger, add
from tests.oracle.rules.order import Mixture
from tests.oracle.rules.proofs import prove
from tests.oracle.rules.quota import within_quotas
from tests.oracle.rules.stride import Stride
from tests.oracle.rules.timeline import Timeline
from tests.oracle.starts import Starts
from tests.oracle.steps import Step
from tests.oracle.totals import Totals

FAILURES_SHOWN = 100

SEQUENCES_A_SECOND = 100_000_000
"""A run's numbers begin at its first revision, which the service makes from the time in microseconds. So a run of a
deleted one's name gives other ids to its tasks; late results for the former's are not taken for those of its own."""

_in_effect = cache(in_effect)

LIVE = (GroupState.QUEUED, GroupState.FORMING, GroupState.DELIVERED)
"""States of the groups that quotas bound."""


@dataclass(slots=True, eq=False)
class RunState:
    """Everything that is known of a run."""

    run_id: str
    stated: RunPolicy
    """The policy as it was stated; `policy` is the one in effect."""
    created_ms: int
    now: int
    """Time of the present operation, ms; never goes back."""
    revision: int = 1
    secret: str = ""
    """Secret of the proofs that the run's revisions carry."""
    changed: bool = False
    decision: Decision = NO_DECISION
    decided_at: int = -1
    """Version for which the controller decided last."""
    seen_revision: int = 0
    """Highest revision that a caller has proven to have seen of a store that was rolled back."""
    claim: Revision = NO_REVISION
    """Claim: what the caller of the present operation has seen."""
    rolled_back: bool = False
    held: bool = False
    """True while an operator holds it."""
    draining: bool = False

    term: int = 1
    published: WeightVersion = WeightVersion(term=1, version=0)  # noqa: RUF009 (frozen)
    manifest: bytes = b""
    plan: PlanCollective | None = None
    """Plan of weights newer than the published ones."""
    publishes: list[PublishedAt] = field(default_factory=list)
    """Publishes in order of committed_steps, one entry for each."""
    timeline: Timeline = field(default_factory=Timeline)

    next_step: int = 0
    committed_steps: int = 0
    checkpointed_steps: int = 0
    published_steps: int = 0
    """Steps that the last publish covered."""
    world_size: int = 0
    steps: dict[int, Step] = field(default_factory=dict)
    """Steps from checkpointed_steps to below next_step; and next_step, the open one, while its micro-batches are not
    all closed.
    """
    retained_bytes: int = 0
    """Payload bytes of the trained steps that are retained."""

    cursor: int = 0
    feeder_state: bytes = b""
    sequence: int = 0
    turns: int | None = None
    """The last turn that was given since order became submission."""
    last_submit: tuple[str, Submitted] | None = None
    last_resume: tuple[str, Resumed] | None = None

    tasks: dict[str, Task] = field(default_factory=dict)
    pending: PendingTasks = field(default_factory=PendingTasks)
    leases: LeaseBook = field(default_factory=LeaseBook)
    queue: GroupQueue = field(default_factory=GroupQueue)
    line: PushLine = field(default_factory=PushLine)
    mixture: Mixture = field(init=False)
    starts: Starts = field(default_factory=Starts)
    lease_turns: Stride = field(default_factory=Stride)
    queue_turns: Stride = field(default_factory=Stride)
    payloads: Payloads = field(default_factory=Payloads)
    staged: dict[str, int] = field(default_factory=dict)
    """Payloads of blocked pushes, with the time of the last try (ms)."""
    ended: dict[str, Task] = field(default_factory=dict)
    """Tombstones that no retained step keeps: they go with the next checkpoint."""

    needed: int | None = None
    """Groups that the last pull that was short waits for; None: none has been."""
    stage_leases: int = 0
    """Leases of groups in stages so far."""
    stage_notes: dict[str, StageNote] = field(default_factory=dict)
    stage_workers: dict[tuple[str, str], tuple[str, str, list[tuple[Group, Hold]]]] = field(default_factory=dict)
    """Workers of stages by stage and name: process, last request that was given groups, and these."""

    leaseless: bool = False
    """A group was accepted without a lease."""
    stale_wait: tuple[int, int] = (-1, 0)
    """The step that waits, or waited, for groups in flight, and since when (ms)."""
    late_wait: tuple[int, int] = (-1, 0)
    """Complete step that lacks groups, and since when (ms)."""
    awaited: tuple[int, str, int] = (0, "", 0)
    """Groups that it waits for, the first task of them (empty where they go by their heads), and when it did last."""
    refused: tuple[int, int] = (1, 1)
    """Tokens and bytes of the last leased group that found no room since the last micro-batch; (1, 1): none."""
    remembered: dict[str, int] = field(default_factory=dict)
    """Tasks that were forgotten since, with the revision at which they were."""
    forgotten: int = field(init=False)
    """The highest revision among those that are remembered no more; at first, that with which the run began."""

    kept: dict[int, Kept] = field(default_factory=dict)
    """Trained groups that may be used again, or are, by sequence."""
    uses: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("drawn", "delivered", "trained", "given_back", "lost"), 0)
    )
    regenerates: bool = False
    """A resume begins before the checkpoint: names of tasks are forgotten with them."""

    group_ledger: GroupLedger = field(default_factory=GroupLedger)
    environment_ledgers: dict[str, GroupLedger] = field(default_factory=dict)
    environments: set[str] = field(default_factory=set)
    """Environments of all tasks and accepted groups so far."""
    task_ledger: TaskLedger = field(default_factory=TaskLedger)
    statistics: dict[str, int] = field(default_factory=lambda: {name: each.begins for name, each in STATISTICS.items()})
    totals: Totals = field(default_factory=Totals)
    failures: deque[TaskFailure] = field(default_factory=lambda: deque(maxlen=FAILURES_SHOWN))
    """The newest last."""
    engines: Engines = field(default_factory=Engines)
    evaluations: Book = field(default_factory=Book)
    after_accept: tuple[RunPolicy, Amount, Amount] | None = None
    """State for the invariants: the policy, what was queued and what was live right after the last group was queued."""

    def __post_init__(self) -> None:
        self.mixture = Mixture.of(self.policy)
        self.forgotten = self.revision
        self.sequence = self.revision // 1_000_000 % 1_000_000 * SEQUENCES_A_SECOND

    # ── policy and pauses ──

    def replace_policy(self, policy: RunPolicy) -> None:
        """Another policy from now on; turns end with the last share."""
        self.stated = policy
        self.mixture = Mixture.of(policy)
        self.totals.snapshots.clear()
        if policy.stale_action is not StaleAction.WAIT:
            self.await_nothing()
        if not self.has_window:
            for task in self.leases.tasks.values():
                task.holds_window = False
        if policy.order is not Order.SUBMISSION and self.turns is not None:
            self.sequence, self.turns = max(self.sequence, self.turns), None
        if not self.mixture.has_shares:
            self.lease_turns.reset()
            self.queue_turns.reset()
        self.changed = True

    @property
    def policy(self) -> RunPolicy:
        """The policy with what a controller lowered."""
        return _in_effect(self.stated, self.decision.knobs, self.world_size)

    def await_nothing(self) -> None:
        """Batches do not wait for what is leased now."""
        for task in self.leases.tasks.values():
            task.awaited = None

    @property
    def paused(self) -> str:
        """Say why the run is paused, empty when it is not; the gravest reason."""
        if self.rolled_back:
            return Pause.STORE_ROLLED_BACK
        if self.held:
            return Pause.OPERATOR
        over = over_budget(self.policy, self.task_ledger.states[TaskState.FAILED])
        return Pause.FAILURE_BUDGET_EXCEEDED if over else ""

    # ── bookkeeping ──

    def settle(self) -> Revision:
        """The operation's reply is made: its revision."""
        if self.changed:
            self.revision += 1
            self.changed = False
        return self.signed_revision

    @property
    def signed_revision(self) -> Revision:
        """The revision as replies carry it that acknowledge something."""
        return prove(self.secret, self.revision)

    def count(self, statistic: str, amount: int = 1) -> None:
        """Raise a counter."""
        self.statistics[statistic] += amount
        self.changed = True

    def next_sequence(self) -> int:
        """A sequence number of its own, from 1."""
        self.sequence += 1
        return self.sequence

    def take_place(self, task: Task) -> int:
        """The sequence of a task's group, which in the order of submission is that of its first lease."""
        if self.policy.order is not Order.SUBMISSION:
            return self.next_sequence()
        if task.turn is None:
            self.turns = task.turn = (self.sequence if self.turns is None else self.turns) + 1
        return task.turn

    @property
    def has_window(self) -> bool:
        """Tell whether batches wait for leases by their turns."""
        return self.policy.order is Order.SUBMISSION and self.policy.order_window_groups > 0

    # ── checks that operations share ──

    def require_term(self, term: int) -> None:
        """Refuse a trainer that was superseded, or whose run of this name was deleted."""
        claim = self.claim
        is_of_another_run = claim and claim.proof and claim.proof != prove(self.secret, claim).proof
        if term != self.term or is_of_another_run:
            raise StaleTerm(term, self.term)

    def require_store(self) -> None:
        """Refuse while acknowledged writes are known to be lost."""
        if self.rolled_back:
            raise RunPaused(self.run_id, Pause.STORE_ROLLED_BACK)

    def require_running(self) -> None:
        """Refuse work for the trainer while the run is paused."""
        if self.paused == Pause.FAILURE_BUDGET_EXCEEDED:
            failed = self.task_ledger.states[TaskState.FAILED]
            raise FailureBudgetExceeded(failed, self.policy.failure_budget, self.failures[-1].error)
        if self.paused:
            raise RunPaused(self.run_id, self.paused)

    # ── clock ──

    @property
    def unpublished_steps(self) -> int:
        """Assembled steps that the last publish did not cover."""
        return self.next_step - self.published_steps

    @property
    def missing(self) -> int:
        """Groups that complete steps lack for rejected ones."""
        return sum(step.missing for step in self.steps.values())

    @property
    def train_version(self) -> int:
        """Estimate of the version that will train on the next unassembled step."""
        return self.train_version_of(self.next_step)

    @property
    def first_train_version(self) -> int:
        """Least version that trains on a step that takes groups."""
        lacking = [step.form.train_version for _, step in sorted(self.steps.items()) if step.missing]
        return min([self.train_version, *lacking[:1]])

    def train_version_of(self, step: int) -> int:
        """Version that trains on a step that no publish covers."""
        steps = step - self.published_steps
        return next_train_version(self.published.version, steps, self.policy.batches_per_publish)

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
        """A task whose group is gone is generated again from nothing, as the next incarnation."""
        task.incarnation += 1
        task.attempt = 0
        task.failures = 0
        task.accepted_attempt, task.accepted_key, task.added = None, "", {}
        task.came_back = True
        self.make_pending(task, self.now)

    def take_turn(self, turns: Stride, environment: str) -> None:
        """A thing of that environment was picked; one without a share waits for nobody's turn."""
        share = self.mixture.share(environment)
        if self.mixture.has_shares and share > 0:
            turns.take(environment, share)

    # ── groups ──

    def move_group(self, group: Group, target: GroupState) -> None:
        """The only way in which a group changes state."""
        ledger = self.environment_ledgers.setdefault(group.environment, GroupLedger())
        for one in (self.group_ledger, ledger):
            one.move(group.group_id, group.amount, group.state, target)
        group.state = target
        self.changed = True

    def enqueue(self, group: Group) -> None:
        """A group is accepted, or comes back from a batch."""
        self.move_group(group, GroupState.QUEUED)
        self.queue.add(group)

    def grow(self, group: Group, size_bytes: int) -> None:
        """A queued group has more bytes than it was accepted with."""
        self.queue.remove(group)
        group.facts = replace(group.facts, size_bytes=group.facts.size_bytes + size_bytes)
        self.queue.add(group)
        for ledger in (self.group_ledger, self.environment_ledgers[group.environment]):
            ledger.move(group.group_id, Amount(bytes=size_bytes), NEW, GroupState.QUEUED)

    def dequeue(self, group: Group, target: GroupState) -> None:
        """A group leaves the queue."""
        self.queue.remove(group)
        self.move_group(group, target)

    def end_group(self, group: Group) -> None:
        """A group that moved to a state without exit: its payload goes; its task starts anew or keeps a tombstone."""
        kept = self.kept.get(group.sequence)
        if kept is None:
            for key in group.payload_keys:
                self.payloads.trash(key)
        else:
            kept.spent, kept.orphan, kept.pooled = True, True, False
            kept.holders.discard(kept.origin)
            self.settle_kept(kept)
        if group.state in {GroupState.RECYCLED, GroupState.LOST} and not group.task.leaseless:
            self.start_anew(group.task)
        else:
            self.ended[group.task.task_id] = group.task

    def release_group(self, group: Group, step: int) -> None:
        """A step that has the group is freed."""
        kept = self.kept.get(group.sequence)
        if kept is not None:
            kept.holders.discard(step)
            self.settle_kept(kept)
            return
        for key in group.payload_keys:
            self.payloads.trash(key)
        self.forget_task(group.task.task_id)

    def settle_kept(self, kept: Kept) -> None:
        """Keep a group that changed, or let it go with its payloads and its task where nothing needs it any more."""
        self.changed = True
        if kept.pooled or kept.holders:
            self.kept[kept.group.sequence] = kept
            return
        del self.kept[kept.group.sequence]
        for key in kept.group.payload_keys:
            self.payloads.trash(key)
        if not kept.orphan:
            self.forget_task(kept.group.task.task_id)

    def forget_task(self, task_id: str) -> None:
        """A task goes with its step, or with its tombstone; its name is remembered for the pushes without leases."""
        del self.tasks[task_id]
        self.changed = True
        if self.leaseless and not self.regenerates:
            # The operation raises the revision.
            self.remembered[task_id] = self.revision + 1
        beyond = len(self.remembered) - groups.REMEMBERED_TASKS
        for revision, dropped in sorted((revision, name) for name, revision in self.remembered.items())[
            : max(0, beyond)
        ]:
            del self.remembered[dropped]
            self.forgotten = revision

    def live(self) -> Amount:
        """Everything that quotas bound."""
        total = Amount()
        for state in LIVE:
            total = add(total, self.group_ledger.states[state])
        return total

    def has_room(self, tokens: int, size_bytes: int) -> bool:
        """Tell whether one more group of that size is within caps and quotas."""
        more = Amount(groups=1, tokens=tokens, bytes=size_bytes)
        return self.queue.fits(self.policy, more) and within_quotas(self.policy, add(self.live(), more))

    def has_environment_left(self, environment: str) -> bool:
        """Tell whether the run may have a thing of that environment."""
        return environment in self.environments or len(self.environments) < MAX_ENVIRONMENTS

    def drop_oldest(self) -> None:
        """The oldest queued group makes room."""
        if (group := self.queue.oldest()) is not None:
            self._drop(group)

    def make_way(self) -> bool:
        """The oldest queued group makes room for a pushed one; False where none may.

        While groups are in stages those that wait there do first, then what is ready beyond the next batch.
        """
        staged = [group for group in self.queue if group.stage]
        waiting = [group for group in staged if group.hold is None]
        group = self.queue.oldest()
        if staged:
            ready = [one for one in self.queue if not one.stage]
            beyond = ready if len(ready) >= self.wanted else []
            group = min(waiting or beyond, key=lambda one: one.sequence, default=None)
        if group is None:
            return False
        self._drop(group)
        return True

    @property
    def wanted(self) -> int:
        """Groups that the last pull that was short waits for."""
        return self.policy.batch_groups if self.needed is None else self.needed

    def _drop(self, group: Group) -> None:
        self.dequeue(group, GroupState.DROPPED_OVERFLOW)
        self.end_group(group)

    def new_group(self, task: Task, facts: GroupFacts, payload_key: str) -> Group:
        """A group that is about to be accepted, its versions as of now."""
        sequence, task.turn = self.take_place(task), None
        return Group(
            group_id=group_id(task.task_id, task.incarnation),
            facts=facts,
            task=task,
            sequence=sequence,
            head=self.timeline.effective(facts.head),
            tail=self.timeline.effective(facts.tail),
            mean_milli=self.timeline.effective_milli(facts.mean_milli, facts.tail.term),
            version_tokens=[(self.timeline.effective(made), tokens) for made, tokens in facts.version_tokens],
            payload_key=payload_key,
        )
