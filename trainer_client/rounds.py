"""Where a pull stands within steps and rounds, and rounds put together to whole batches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from trainer_client.batch import Batch


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """One round of one step; a whole batch is round 0."""

    step: int
    round: int = 0

    @classmethod
    def after(cls, batch: "Batch") -> Self:
        """The place that follows a pulled one."""
        return cls(batch.step + 1) if batch.final else cls(batch.step, batch.round + 1)

    def __str__(self) -> str:
        return f"round {self.round} of step {self.step}" if self.round else f"step {self.step}"


def gathered(rounds: Sequence["Batch"]) -> "Batch":
    """All rounds of one step, in order and the last one final, as the whole batch that they are. Copies no array."""
    if len(rounds) == 1:
        return rounds[0]
    infos = [batch.info for batch in rounds]
    # Of a step that was resumed in its middle, a part is new.
    info = replace(
        infos[-1],
        shard_groups=sum(info.shard_groups for info in infos),
        shard_tokens=sum(info.shard_tokens for info in infos),
        replayed=all(info.replayed for info in infos),
        waited_s=sum(info.waited_s for info in infos),
    )
    groups = tuple(group for batch in rounds for group in batch.groups)
    return replace(rounds[-1], info=info, groups=groups, received_bytes=sum(batch.received_bytes for batch in rounds))
