"""Inspection of a run: tasks, groups and steps one by one, and who waits on whom.

Nothing here changes anything. A list comes in pages. Each page is one decision of the store, bounded by `limit` things
that it looks at; things that a filter leaves out count. proto/rollout_buffer/v1/inspect.proto says what holds over the
pages while the run goes on. Times are milliseconds on the run's clock, versions of the present timeline.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeAlias, TypeVar

from buffer_service.domain.admission import OpenStep, capacity
from buffer_service.domain.policy import UNSET, RunPolicy

Position: TypeAlias = tuple[int | str, ...]
"""Position at which a page begins: the `following` of the page before, () for the first page."""

ItemT = TypeVar("ItemT")


class TaskSet(StrEnum):
    """Set of tasks to list."""

    PENDING = "pending"
    LEASED = "leased"
    ENDED = "ended"


class Place(StrEnum):
    """Place of a group: in the queue, in a step, or ended."""

    UNKNOWN = ""
    """The group was accepted before its position was noted with its task."""
    QUEUED = "queued"
    FORMING = "forming"
    DELIVERED = "delivered"
    TRAINED = "trained"
    IN_STEP = "in_step"
    """Group in a step: forming, delivered or trained."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Page(Generic[ItemT]):
    """A part of a list; `following` is empty after the last one."""

    revision: int
    now_ms: int
    items: Sequence[ItemT]
    following: Position


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """A task; `payload_key` is of its partial rollout, `body_key` of its result, "" for none."""

    task_id: str
    sequence: int
    state: str
    environment: str
    priority: int
    incarnation: int
    attempt: int
    failures: int
    error: str
    returned: bool
    leaseless: bool
    not_before_ms: int
    """Time before which the task is not leased again; -1 unless it backs off."""
    expires_ms: int
    """Time at which the lease expires; -1 unless the task is leased."""
    worker_id: str
    instance_id: str
    lease_version: int
    leased_ms: int
    partial_rollout_tokens: int
    payload_key: str
    partial_rollout_head: int
    """Head version of the partial rollout; -1 where that has no tokens."""
    accepted_attempt: int
    """Attempt whose group was accepted; -1 without a result, 0 for a group that was pushed without a lease."""
    filtered: bool
    place: Place
    body_key: str
    lease_ttl_ms: int
    """Time for which a lease lasts without a heartbeat, in milliseconds, from the run's policy."""


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group as it is indexed; micro-batch and rank are -1 in the queue."""

    group_id: str
    task_id: str
    sequence: int
    environment: str
    priority: int
    samples: int
    tokens: int
    response_tokens: int
    longest_tokens: int
    loss_tokens: int
    size_bytes: int
    head: int
    tail: int
    mean_milli: int
    reward_milli: int
    turns: int
    truncated_samples: int
    micro_batch: int
    rank: int


@dataclass(frozen=True, slots=True)
class StepView:
    """A step that is forming or assembled; `ranks` are those of its last micro-batch."""

    step: int
    place: Place
    train_version: int
    target_groups: int
    micro_batch_groups: int
    micro_batches: int
    ranks: int
    groups: int
    samples: int
    tokens: int
    loss_tokens: int
    size_bytes: int
    staleness_sum: int
    staleness_max: int


@dataclass(frozen=True, slots=True)
class BlockedPush:
    """A group in the line for room; `head` is the beginning of its serialized Group, empty when it is gone."""

    size_bytes: int
    since_ms: int
    """Time since which the push has its place; 0 where a service gave it that did not keep times yet."""
    tried_ms: int
    head: bytes


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker by its last request for leases."""

    worker_id: str
    instance_id: str
    asked_ms: int
    leases: int


@dataclass(frozen=True, slots=True)
class AdmissionClock:
    """Counts of groups, versions, steps and tasks that admission uses beside the policy."""

    queued: int
    forming: int
    open_target: int
    """Groups of the open step when it is full; 0 without one."""
    published_version: int
    next_step: int
    published_steps: int
    due_tasks: int
    backing_off_tasks: int
    lookahead_milli: int = UNSET
    """Thousandths of max_lookahead that a controller has in effect; UNSET: the policy's."""
    missing: int = 0
    """Groups that complete steps are still to get for rejected ones."""
    startable_tasks: int = 0
    """Due tasks that the starts_per_minute of their environments let begin now."""

    @property
    def unpublished_steps(self) -> int:
        """Complete steps that the last publish did not cover."""
        return self.next_step - self.published_steps

    @property
    def open_step(self) -> OpenStep:
        """The step that takes groups."""
        return OpenStep(self.open_target, self.forming)

    def room(self, policy: RunPolicy, leased: int) -> int | None:
        """Groups that may still be leased by engines with the newest weights, as `capacity` says."""
        return capacity(
            policy,
            unpublished_steps=self.unpublished_steps,
            open_step=self.open_step,
            queued=self.queued,
            leased=leased,
            lookahead_milli=self.lookahead_milli,
            missing=self.missing,
        )


@dataclass(frozen=True, slots=True)
class Waits:
    """Waits of a run: who waits on whom; the sequences hold the first `limit` of what is counted beside them."""

    revision: int
    now_ms: int
    policy: RunPolicy
    blocked: int
    pushes: Sequence[BlockedPush]
    """Blocked pushes, in the order of the line."""
    leased: int
    expiring: Sequence[TaskFacts]
    """Leased tasks whose leases expire first."""
    workers: int
    asked: Sequence[WorkerView]
    """Workers that asked for leases, the last one first."""
    clock: AdmissionClock
    needed_groups: int
    """Queued groups that the last short pull waits for; 0: none has been short."""
