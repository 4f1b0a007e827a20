"""Steps: what the trainer's batches are made of, micro-batch by micro-batch.

Invariants: a whole batch is one micro-batch, and more where groups of it were rejected; a streamed step keeps the form
of its first micro-batch until it is complete; a micro-batch never changes, except that a lost or rejected group leaves
it and that it is split again for another world size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from tests.oracle.records import Group
from tests.oracle.rules.sharding import shard

Loads: TypeAlias = Sequence[tuple[int, int]]
"""Tokens and groups by rank."""


@dataclass(frozen=True, slots=True)
class Form:
    """Form of a step, fixed with its first micro-batch."""

    train_version: int
    target: int
    """Groups of a full step."""
    micro_groups: int
    """Groups of a rank in a micro-batch; 0: one micro-batch, a whole batch."""
    token_budget: int
    """Tokens of a full step, 0 for no such bound."""
    equal: bool
    """Every rank gets the same number of groups."""

    @property
    def streamed(self) -> bool:
        """Tell whether it comes in micro-batches."""
        return self.micro_groups > 0


@dataclass(slots=True, eq=False)
class MicroBatch:
    """Groups that closed together, by rank, and how stale they were then."""

    shards: list[list[Group]]
    staleness: dict[str, int]
    """Staleness by group id: versions behind train_version, by head."""
    stalest_milli: int
    """The largest staleness by the policy's measure, milli-versions."""
    max_staleness: int
    """η as of closing."""
    replaces: bool = False
    """Makes up for rejected groups of its step."""

    @property
    def world_size(self) -> int:
        """Ranks it is split for."""
        return len(self.shards)

    @property
    def groups(self) -> Iterator[Group]:
        """Its groups, rank by rank."""
        return (group for shard in self.shards for group in shard)

    def split(self, world_size: int, *, equal: bool, loads: Loads | None) -> None:
        """Split it for that many ranks, which have these loads already."""
        self.shards = split(list(self.groups), world_size, equal=equal, loads=loads)

    def remove(self, group: Group) -> None:
        """A group is lost, or rejected."""
        for mine in self.shards:
            if group in mine:
                mine.remove(group)
        del self.staleness[group.group_id]


@dataclass(slots=True, eq=False)
class Step:
    """A step of which at least one micro-batch is closed."""

    step: int
    form: Form
    micro_batches: list[MicroBatch] = field(default_factory=list)
    missing: int = 0
    """Groups that it is still to get for rejected ones, once it is complete and until it is committed."""
    reused: MicroBatch | None = None
    """Groups that it uses again, which come with its first micro-batch; None: it never had any."""
    prior_uses: dict[str, int] = field(default_factory=dict)
    """Steps that had them before, by group id."""
    rejected: set[str] = field(default_factory=set)
    """Ids of its groups that were rejected."""
    uneven: bool = False
    """A group was rejected or lost while it was open."""

    @property
    def world_size(self) -> int:
        """Ranks that its first micro-batch is split for."""
        return self.micro_batches[0].world_size

    @property
    def groups(self) -> list[Group]:
        """All groups of its own that it has by now, in order of sequence."""
        return sorted((group for one in self.micro_batches for group in one.groups), key=lambda group: group.sequence)

    @property
    def reused_again(self) -> list[Group]:
        """Groups that it uses again."""
        return list(self.reused.groups) if self.reused else []

    @property
    def bytes(self) -> int:
        """Payload bytes of its own groups."""
        return sum(group.facts.size_bytes for one in self.micro_batches for group in one.groups)

    def split_again(self, number: int, world_size: int) -> None:
        """Split a micro-batch for another number of ranks."""
        stored = self.micro_batches[number]
        beside = stored.replaces or (number == 0 and self.reused is not None)
        loads = self.loads(number, world_size) if beside else None
        stored.split(world_size, equal=self.form.equal, loads=loads)

    def loads(self, number: int, world_size: int) -> Loads:
        """Tokens and groups that each rank has of the micro-batches before this one, and of what is used again."""
        if self.reused is not None and self.reused.world_size != world_size:
            self.reused.split(world_size, equal=self.form.equal, loads=None)
        for earlier in range(number):
            if self.micro_batches[earlier].world_size != world_size:
                self.split_again(earlier, world_size)
        before = [*([self.reused] if self.reused else []), *self.micro_batches[:number]]
        mine = [[one.shards[rank] for one in before] for rank in range(world_size)]
        return [(sum(g.facts.tokens for part in parts for g in part), sum(map(len, parts))) for parts in mine]

    @property
    def is_full(self) -> bool:
        """Tell whether the micro-batch that just closed was its last."""
        if not self.form.streamed:
            return True
        groups = self.groups
        tokens = sum(group.facts.tokens for group in groups)
        return len(groups) >= self.form.target or 0 < self.form.token_budget <= tokens


def split(groups: Sequence[Group], world_size: int, *, equal: bool, loads: Loads | None = None) -> list[list[Group]]:
    """Groups by rank, balanced by tokens."""
    by_sequence = {group.sequence: group for group in groups}
    sizes = [(group.sequence, group.facts.tokens) for group in groups]
    return [[by_sequence[sequence] for sequence in part] for part in shard(sizes, world_size, equal=equal, loads=loads)]
