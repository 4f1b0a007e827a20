"""Keys of pulls within steps and micro-batches, and the joining of micro-batches into whole batches."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from trainer_client.batch import Batch, BatchInfo


@dataclass(frozen=True, slots=True, order=True)
class PullKey:
    """Place of a pull: one micro-batch of one step; a whole batch is micro-batch 0."""

    step: int
    micro_batch: int = 0

    @classmethod
    def after(cls, batch: "Batch") -> Self:
        """Return the key that follows a pulled batch or micro-batch."""
        return cls(batch.step + 1) if batch.final else cls(batch.step, batch.micro_batch + 1)

    @classmethod
    def of(cls, batch: "Batch") -> Self:
        """Return the key at which a batch or micro-batch was pulled."""
        return cls(batch.step, batch.micro_batch)

    def __str__(self) -> str:
        return f"micro-batch {self.micro_batch} of step {self.step}" if self.micro_batch else f"step {self.step}"


class MicroBatches:
    """Micro-batches of one step that were pulled so far, in order."""

    def __init__(self) -> None:
        self._come: deque[Batch] = deque()

    def __len__(self) -> int:
        return len(self._come)

    def add(self, batch: "Batch") -> None:
        """Add the next micro-batch of the step."""
        self._come.append(batch)

    def next(self) -> "Batch | None":
        """Remove and return the first micro-batch; None when there is none."""
        return self._come.popleft() if self._come else None

    def whole(self) -> "Batch | None":
        """Remove all micro-batches and return them as one batch; None until the final micro-batch came."""
        if not (self._come and self._come[-1].final):
            return None
        whole = joined(self._come)
        self._come.clear()
        return whole


def without(batch: "Batch", group_ids: Collection[str], now: "BatchInfo") -> "Batch":
    """Return a batch without groups that its step has lost, with the totals that the step has `now`."""
    groups = tuple(group for group in batch.groups if group.group_id not in group_ids)
    info = replace(
        now,
        micro_batch=batch.micro_batch,
        final=now.final and batch.micro_batch >= now.micro_batch,
        shard_groups=len(groups),
        shard_tokens=sum(sample.tokens for group in groups for sample in group.header.samples),
        replayed=batch.info.replayed,
        queued_groups=batch.info.queued_groups,
        waited_s=batch.info.waited_s,
    )
    return replace(batch, info=info, groups=groups)


def joined(micro_batches: Sequence["Batch"]) -> "Batch":
    """Join micro-batches of a step into one batch. Copies no array."""
    if len(micro_batches) == 1:
        return micro_batches[0]
    infos = [batch.info for batch in micro_batches]
    # Of a step that was resumed in its middle, a part is new.
    info = replace(
        infos[-1],
        shard_groups=sum(info.shard_groups for info in infos),
        shard_tokens=sum(info.shard_tokens for info in infos),
        replayed=all(info.replayed for info in infos),
        waited_s=sum(info.waited_s for info in infos),
        committed_steps=infos[0].committed_steps,
        checkpointed_steps=infos[0].checkpointed_steps,
    )
    groups = tuple(group for batch in micro_batches for group in batch.groups)
    return replace(
        micro_batches[-1], info=info, groups=groups, received_bytes=sum(batch.received_bytes for batch in micro_batches)
    )
