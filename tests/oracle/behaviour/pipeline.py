"""Generation and training of one run in virtual time, on the reference model: how a policy paces them, and what is
trained.

A number of slots generates one group each at a time, for as long as its longest response takes. It does so with the
weights that are published when it starts; a slot takes the next task as soon as its group is accepted. The trainer
takes a batch, or a micro-batch of one, as soon as it is free and enough groups are there. It trains on it for its part
of train_ms, and after a whole step publishes and frees what it trained on. Nothing else takes time. Invariant:
everything follows from the seed.
"""

import heapq
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from buffer_service.domain import ops
from tests.oracle.behaviour.world import RUN, World

T = TypeVar("T")

GROUP_SIZE = 4
TOKENS_PER_MS = 1


class Unchecked(World):
    """Without the invariants after each word: a pipeline says a great many."""

    def do(self, operation: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return operation(RUN, *args, **kwargs)


@dataclass
class Generated:
    """A group on its way: its lease, the version it was started with, its responses' lengths."""

    grant: ops.LeaseGrant
    head: int
    lengths: list[int]


@dataclass
class Pipeline:
    """A run of `steps` steps; `spread` is the sigma of the lognormal response lengths, 0 for equal ones."""

    policy: dict[str, Any]
    slots: int
    train_ms: int
    mean_length: int = 400
    spread: float = 0.0
    seed: int = 1
    trained: list[ops.Batch] = field(default_factory=list)
    """Batches, or their micro-batches."""
    completed: list[int] = field(default_factory=list)
    """Mean response length of every group that was generated to its end."""
    lengths: dict[str, float] = field(default_factory=dict)
    """Lengths by group id."""
    ahead: list[int] = field(default_factory=list)
    """Groups that exist beyond the trained batches, whenever a task was leased."""

    def __post_init__(self) -> None:
        self.world = Unchecked(**self.policy)
        self._random = random.Random(self.seed)
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = 0
        self._free = self.slots
        self._blocked: list[tuple[ops.GroupFacts, ops.Pushed]] = []
        self._training = False
        self._micro_batch = 0

    def run(self, steps: int) -> "Pipeline":
        """Train that many steps."""
        while self.world.view.committed_steps < steps:
            self._go_on()
            assert self._events, "nothing happens any more"
            self.world.now, _, happen = heapq.heappop(self._events)
            happen()
        self.world.model.check_invariants(RUN)
        return self

    @property
    def staleness(self) -> list[list[int]]:
        """Staleness of the groups of every batch, in versions."""
        return [[batch.train_version - group.head_version for group in batch.shard] for batch in self.trained]

    @property
    def in_queue_staleness(self) -> float:
        """Mean over the trained groups, in versions."""
        view = self.world.view
        return view.statistics["in_queue_staleness_sum"] / view.statistics["assembled_groups"]

    @property
    def length_bias(self) -> float:
        """Mean length of what was trained over that of what was generated."""
        trained = [self.lengths[group.group_id] for batch in self.trained for group in batch.shard]
        return statistics.fmean(trained) / statistics.fmean(self.completed)

    # ── what happens ──

    def _at(self, delay_ms: int, happen: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (self.world.now + delay_ms, self._order, happen))

    def _go_on(self) -> None:
        """Everything that can happen now."""
        self._pull()
        self._retry()
        self._lease()

    def _pull(self) -> None:
        if self._training:
            return
        pulled = self.world.pull(micro_batch=self._micro_batch)
        if isinstance(pulled, ops.Batch):
            self.trained.append(pulled)
            self._training = True
            part_ms = self.train_ms * len(pulled.shard) // self.world.view.policy.batch_groups
            self._at(part_ms, lambda: self._trained(pulled))

    def _trained(self, batch: ops.Batch) -> None:
        self._training = False
        self._micro_batch = 0 if batch.final else self._micro_batch + 1
        if batch.final:
            self.world.publish(self.world.view.published.version + 1, commit=batch.step)
            self.world.checkpoint(batch.step)

    def _retry(self) -> None:
        waiting, self._blocked = self._blocked, []
        for facts, blocked in waiting:
            self._accept(facts, self.world.retry(facts, blocked))

    def _lease(self) -> None:
        while self._free:
            if self.world.tasks("pending") < self.slots:
                self.world.submit(*(f"task-{self.world.view.cursor + i}" for i in range(self.slots)))
            grants = self.world.lease(self._free).grants
            if not grants:
                return
            self._free -= len(grants)
            view = self.world.view
            self.ahead.append(view.groups["queued"].groups + view.tasks["leased"])
            for grant in grants:
                lengths = [self._length() for _ in range(GROUP_SIZE)]
                generated = Generated(grant, view.published.version, lengths)
                self._at(max(lengths) // TOKENS_PER_MS, lambda generated=generated: self._finish(generated))  # type: ignore[misc]

    def _length(self) -> int:
        if self.spread == 0:
            return self.mean_length
        # A lognormal with this mean.
        return max(1, round(self.mean_length * self._random.lognormvariate(-(self.spread**2) / 2, self.spread)))

    def _finish(self, generated: Generated) -> None:
        mean = statistics.fmean(generated.lengths)
        self.completed.append(round(mean))
        self.lengths[f"{generated.grant.task_id}/{generated.grant.incarnation}"] = mean
        facts = self.world.facts(
            generated.grant,
            head=generated.head,
            tail=self.world.view.published.version,
            tokens=sum(generated.lengths),
            response_tokens=(min(generated.lengths), max(generated.lengths)),
        )
        self._accept(facts, self.world.push_facts(facts)[0])

    def _accept(self, facts: ops.GroupFacts, pushed: ops.Pushed) -> None:
        if pushed.kind is ops.PushKind.BLOCKED:
            self._blocked.append((facts, pushed))
            return
        self._free += 1
