"""Selection of a step's groups: a filter, whose groups are replaced by others, then a sampler, whose are not.

Invariant: a group that was given back is not in the batch, also when a call fails in the middle and is made again.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from buffer_wire.errors import InvalidField
from buffer_wire.validate import is_trainable
from rollout_buffer.v1 import groups_pb2
from trainer_client.selection.facts import GroupFacts
from trainer_client.selection.selector import Selector

if TYPE_CHECKING:
    from trainer_client.batch import Batch, Group

logger = logging.getLogger("trainer_client")

_OFTEN = 8
"""Number of times that a filter gives groups of one step back, from which on the log says so, each time it doubles."""


class GiveBack(Protocol):
    """Callable that gives groups of a batch back and returns the batch without them, `others`: with as many others."""

    def __call__(
        self,
        batch: "Batch",
        groups: "Sequence[Group]",
        reason: str,
        *,
        barrier: Callable[[], object] | None,
        others: bool,
    ) -> "Batch":
        """Raise what `TrainerSession.reject` raises."""


class Selection:
    """Selection by functions that are named `module:function`; None: no such one.

    `timeout_s`: longest time, in seconds, for one answer. `barrier`: returns when every rank has called it; None with
    a single rank.
    """

    def __init__(
        self, group_filter: str | None, sampler: str | None, timeout_s: float, barrier: Callable[[], object] | None
    ) -> None:
        self._filter = Selector(group_filter, timeout_s) if group_filter else None
        self._sampler = Selector(sampler, timeout_s) if sampler else None
        self._barrier = barrier
        self._given_back: set[str] = set()
        """Groups of the batch in hand that were given back, or may have been when a call failed."""

    def __bool__(self) -> bool:
        return self._filter is not None or self._sampler is not None

    def select(self, batch: "Batch", give_back: GiveBack, *, is_whole: bool) -> "Batch":
        """Return the batch as it is selected.

        Raises SelectionFailed, what `give_back` raises, and InvalidField for a sampler of parts of a step.
        """
        if self._sampler is not None and not is_whole:
            raise InvalidField("sampler", self._sampler.name, "none with micro_batches(): it chooses among whole steps")
        if self._filter is not None:
            batch = self._filtered(self._filter, batch, give_back)
        if self._sampler is not None:
            # With several ranks each one says that it gives back, also nothing.
            dropped = self._dropped(self._sampler, batch.groups)
            if dropped or self._barrier is not None:
                reason = f"sampler {self._sampler.name}"
                batch = give_back(batch, dropped, reason, barrier=self._barrier, others=False)
        self._given_back.clear()
        return batch

    def close(self) -> None:
        """End the functions' processes."""
        for selector in (self._filter, self._sampler):
            if selector is not None:
                selector.close()

    def _filtered(self, selector: Selector, batch: "Batch", give_back: GiveBack) -> "Batch":
        """Ask for the groups, then for those that came in place of others, until all are kept."""
        # What is used again was judged when it was new.
        asked: Sequence[Group] = [group for group in batch.groups if not group.prior_uses]
        times = 0
        while True:
            dropped = self._dropped(selector, asked)
            if not dropped and self._barrier is None:
                return batch
            before, known = batch.micro_batch, {group.group_id for group in batch.groups}
            reason = f"filter {selector.name}"
            batch = give_back(batch, dropped, reason, barrier=self._barrier, others=True)
            if batch.micro_batch == before:
                # No rank gave anything back, or no others come, or they come as micro-batches of their own.
                return batch
            asked = [group for group in batch.groups if group.group_id not in known]
            times += 1
            if times >= _OFTEN and times.bit_count() == 1:
                logger.warning("%s has given groups of step %d back %d times", selector.name, batch.step, times)

    def _dropped(self, selector: Selector, groups: "Sequence[Group]") -> "list[Group]":
        asked = [group for group in groups if group.group_id not in self._given_back]
        keeps = selector.keeps([facts_of(group) for group in asked])
        self._given_back |= {group.group_id for group, kept in zip(asked, keeps, strict=True) if not kept}
        return [group for group in groups if group.group_id in self._given_back]


def facts_of(group: "Group") -> GroupFacts:
    """Read the facts of a group."""
    samples = group.header.samples
    return GroupFacts(
        group_id=group.group_id,
        task_id=group.task_id,
        environment=group.environment,
        metadata=dict(group.metadata),
        rewards=[sample.reward for sample in samples],
        response_tokens=[sample.tokens - sample.prompt_len for sample in samples],
        loss_tokens=[sample.loss_tokens for sample in samples],
        truncated=[sample.finish_reason == groups_pb2.FINISH_REASON_LENGTH for sample in samples],
        staleness=group.staleness,
        train_version=group.train_version,
        trajectories=[sample.trajectory - 1 if sample.trajectory else i for i, sample in enumerate(samples)],
        trainable=[is_trainable(sample) for sample in samples],
        policies=[sample.policy for sample in samples],
    )
