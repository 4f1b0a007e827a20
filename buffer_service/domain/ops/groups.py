"""Groups as they are pushed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from buffer_service.domain.ops.tasks import TaskSink
from buffer_service.domain.ops.weights import WeightVersion
from buffer_wire.revision import Revision

Buffer: TypeAlias = bytes | bytearray | memoryview

PORTION = 32
"""Largest number of groups that one script takes on. The revision rises once for so many groups of a push.

A script holds the store up while it runs: 0.5 to 2 ms for a portion with a million groups queued.
"""

TAKEN_AT_ONCE = 128
"""Largest number of groups that one script takes out of the queue for a micro-batch, in the time of a portion."""

TICKET_MS = 3_000
"""A blocked push at the head of the line that has not tried for longer loses its place."""

STAGING_AGE_MS = 600_000
"""A payload that was staged, is not indexed and has not been tried for this long belongs to a replica that died, or to
nobody."""

UNPUSHED_MS = 600_000
"""Time for which a payload that its client wrote lies in the store before a push names it, or tries again after a
full queue."""

REMEMBERED_TASKS = 32_768
"""Names of tasks that a run keeps after their checkpoint, where groups are pushed without leases: 100 bytes each."""


@dataclass(slots=True)
class GroupFacts:
    """Facts of a pushed group that the rules need. `lease_id` is empty for a push without a lease.

    Nobody changes them. Frozen ones take three times as long to make, for every group.
    """

    task_id: str
    incarnation: int
    lease_id: str
    environment: str
    samples: int
    tokens: int
    loss_tokens: int
    size_bytes: int
    """Length of the serialized wire Group that is stored."""
    head: WeightVersion
    tail: WeightVersion
    spans_versions: bool
    """True when tokens of the group came from more than one weight version."""
    mean_milli: int
    """Mean over all response tokens of the version that made each, in milli-versions, rounded down."""
    equal_rewards: bool
    """True when there are two or more trajectories, and what one policy wrote has the same reward in all of them."""
    mean_reward_milli: int
    """Mean reward of the trajectories in milli-rewards, rounded down, within +-NO_REWARD_BOUND."""
    response_lengths: bytes
    """Response tokens of each sample, little-endian uint32."""
    rewards: bytes
    """Reward of each sample, little-endian float32."""
    min_response_tokens: int
    max_response_tokens: int
    response_tokens: int
    """Response tokens of all samples."""
    reward_milli: int
    """Sum of the samples' rewards, each rounded to milli-rewards, within +-NO_REWARD_BOUND. Where some are rows of one
    trajectory, the mean reward times the samples."""
    turns: int
    """Turns of role assistant; a sample without turns has one."""
    truncated_samples: int
    """Samples with finish reason LENGTH."""
    version_tokens: Sequence[tuple[WeightVersion, int]] = ()
    """Response tokens of each version below the tail, the others are the tail's; empty: all count as made with the mean
    version. Versions that are more than totals.MOST_BEHIND behind the tail may be told as that many."""

    failed_samples: int = 0
    """Samples with a named failure."""
    first_revision: int = 0
    """Revision of the run, as the pusher knew it before it first tried this group; 0: the present one."""
    stored: bool = False
    """True when its pusher has written it to the store, or says so."""
    trajectories: int = 0
    """Trajectories with a row that is trainable; 0: each sample is one."""
    trajectory_rewards: bytes = b""
    """Reward of each trajectory, those of each policy apart, little-endian float32; empty: each sample is one."""


class PushKind(StrEnum):
    """Outcome for a pushed group."""

    QUEUED = "queued"
    DUPLICATE = "duplicate"
    CLOSED = "closed"
    REJECTED_FULL = "rejected_full"
    BLOCKED = "blocked"
    UNKNOWN_LEASE = "unknown_lease"
    GONE = "gone"
    """Blocked before, and given up since: nobody had tried for STAGING_AGE_MS. Its body has to come again."""
    FILTERED = "filtered"
    """Accepted, and ended by the run's filter."""
    RECORDED = "recorded"
    """The result of an evaluation's task."""
    ADDED = "added"
    """Columns of a stage, which its group has now."""
    EVALUATIONS_FULL = "evaluations_full"
    """Not recorded: the run keeps as much of evaluations as it may."""
    PAYLOAD_MISSING = "payload_missing"
    """Not accepted: what its pusher has written is not there, or not free for it."""
    FORGOTTEN = "forgotten"
    """Pushed without a lease, and first tried before what the run remembers: perhaps it was accepted then."""
    INVALID = "invalid"
    """Refused for good: above a cap on its own, or of an incarnation that does not exist yet."""


@dataclass(slots=True)
class Pushed:
    """Outcome for one group, which nobody changes. `payload_key` is set for BLOCKED: the body stays stored under it for
    `retry_push`.
    """

    kind: PushKind
    group_id: str
    payload_key: str = ""
    field: str = ""
    """Field that is to blame, for INVALID, FORGOTTEN and EVALUATIONS_FULL; `value` and `limit` complete the error."""
    value: str = ""
    limit: str = ""
    sink: TaskSink = TaskSink.QUEUE
    """Sink that the group goes to, or would go to."""


@dataclass(slots=True)
class NewGroup:
    """A group on its way to the store: facts, the serialized wire Group, stored untouched and returned byte for byte,
    and what became of it.
    """

    facts: GroupFacts
    body: Buffer = field(repr=False)
    """Empty where its pusher has written it to the store."""
    checksum: int = 0
    """Checksum of its header and payload, which its payload key names."""
    nonce: bytes = b""
    """Nonce of its payload key; empty: one is drawn."""
    parts: int = 0
    """Parts in which its payload lies; 0: it lies under its key alone."""
    outcome: Pushed | None = None
    """Outcome of the last try. Whoever has groups pushed sets it, and lets the body go once the store has it."""


@dataclass(frozen=True, slots=True)
class PushResult:
    """Outcomes in request order."""

    revision: Revision
    outcomes: Sequence[Pushed]
    published: WeightVersion
