"""Pulls, batches and resumes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from buffer_service.domain.ops.tasks import AddedColumns
from buffer_wire.revision import Revision


@dataclass(frozen=True, slots=True)
class Pull:
    """A try to pull a rank's shard of a micro-batch of a step; whole batches have micro-batch 0 only.

    train_version None: that of the step's earlier micro-batches, else the published version. batch_groups None: the
    policy's.
    """

    term: int
    step: int
    rank: int
    world_size: int
    train_version: int | None
    micro_batch: int = 0
    batch_groups: int | None = None


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """A group of a shard; head and tail in the present timeline."""

    group_id: str
    payload_key: str
    sequence: int
    head_version: int
    tail_version: int
    added: Sequence[AddedColumns] = ()
    """Columns that stages have added, in their order."""
    prior_uses: int = 0
    """Steps that have trained on it before."""
    stage: str = ""
    """Stage that has added what lies under the key; empty: the group itself lies there."""

    def pieces(self) -> "Iterator[ShardGroup]":
        """Yield the group, then what each stage has added to it, each with a key of its own."""
        yield self
        for added in self.added:
            yield replace(self, payload_key=added.payload_key, added=(), stage=added.stage)


@dataclass(frozen=True, slots=True)
class Batch:
    """A closed micro-batch of a step as one rank sees it.

    Totals are over all ranks and the step's micro-batches up to this one, hence the step's totals when `final`.
    """

    revision: Revision
    step: int
    micro_batch: int
    final: bool
    train_version: int
    total_groups: int
    total_samples: int
    total_tokens: int
    total_loss_tokens: int
    total_trajectories: int
    reused_groups: int
    staleness_sum: int
    staleness_max: int
    shard: Sequence[ShardGroup]
    shard_tokens: int
    replayed: bool
    queued: int

    @property
    def pieces(self) -> "list[ShardGroup]":
        """Payloads of the shard, in order: each group, then what stages have added to it."""
        return [piece for group in self.shard for piece in group.pieces()]


MAX_REJECTED = 4_096
"""Largest number of groups that one Reject names."""


@dataclass(frozen=True, slots=True)
class Reject:
    """Groups that a trainer gives back of a step, by their ids, and its reason."""

    term: int
    step: int
    group_ids: Sequence[str]
    reason: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """A step after groups of it were rejected, `rejected_groups` of them by this call.

    `missing_groups`: those that it is still to get. Totals are the step's as it is now, `micro_batch` is its last one.
    """

    revision: Revision
    rejected_groups: int
    missing_groups: int
    step: int
    micro_batch: int
    final: bool
    train_version: int
    total_groups: int
    total_samples: int
    total_tokens: int
    total_loss_tokens: int
    total_trajectories: int
    reused_groups: int
    staleness_sum: int
    staleness_max: int


AWAITED_MS = 5_000
"""Time for which a pull that waits for groups in flight is believed to do so still; it asks every 2 s."""


def awaited_groups(count: int, first: str) -> str:
    """Say which groups in flight a pull waits for though enough are queued; `first`: by the order of submission."""
    groups = f"{count} group{'s' * (count > 1)} in flight"
    if first:
        return f"{groups} that began order_window_groups before the next ones, first of all task {first}"
    return f"{groups}, too stale for the next batch (stale_action wait)"


@dataclass(frozen=True, slots=True)
class Short:
    """Result of a pull that finds no micro-batch yet: what is queued, what the micro-batch needs, and on whom the pull
    waits.
    """

    revision: Revision
    step: int
    queued: int
    needed: int
    leased: int
    pending: int
    blocked_hint: str
    """"" or why nothing moves although there is work, e.g. `no worker has asked for a lease`."""
    awaited: int = 0
    """Leased tasks that a batch waits for which would be complete without: their groups would be too stale for the next
    one, or began too long before those that are queued.
    """
    awaited_task: str = ""
    """The one of these that began first, where the batch waits by the order of submission; else empty."""


class ResumeMode(StrEnum):
    """Treatment of batches at or after next_step."""

    REPLAY = "replay"
    REQUEUE = "requeue"
    DISCARD = "discard"


@dataclass(frozen=True, slots=True)
class Resume:
    """A trainer takes the run over; next_step None: after the last committed step."""

    next_step: int | None
    mode: ResumeMode
    request_id: str
    allow_regenerate: bool


@dataclass(frozen=True, slots=True)
class Resumed:
    """Result of a resume."""

    revision: Revision
    term: int
    next_step: int
    next_unassembled_step: int
    version: int
    cursor: int
    feeder_state: bytes
