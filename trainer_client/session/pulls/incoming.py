"""Incoming micro-batches of a session, in order, and others for the groups of them that are given back."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from trainer_client.batch import Batch
from trainer_client.client.operations import ServiceClient
from trainer_client.client.pulling import PullSpec
from trainer_client.micro_batches import PullKey, joined, without
from trainer_client.session.clock import TrainClock
from trainer_client.session.metrics import StepMeter
from trainer_client.session.plan import BatchGroups, SessionPlan
from trainer_client.session.pulls.prefetch import Prefetcher
from trainer_client.session.pulls.puller import Puller, PullMicroBatch, PullSource, pulls_of
from trainer_client.state import Rejected, Resumed

logger = logging.getLogger("trainer_client")

MAX_REJECTED = 4_096
"""Largest number of groups that one call gives back."""


def pull_of(
    client: ServiceClient, plan: SessionPlan, start: Resumed, batch_groups: Callable[[], BatchGroups]
) -> PullMicroBatch:
    """Make the callable that pulls a session's micro-batches. `batch_groups`: gives N of the steps from now on."""

    def groups_of(step: int) -> int | None:
        n = batch_groups()
        return n(step) if callable(n) else n

    shard = PullSpec(term=start.term, step=start.next_step, rank=plan.rank, world_size=plan.world_size)
    return pulls_of(client, plan.run_id, shard, groups_of)


class Incoming:
    """Micro-batches of this rank, one after the other; a whole batch that does not stream is one of them.

    Without prefetch the trainer's thread pulls, else a thread of its own. What makes up for rejected groups is pulled
    by the trainer's thread always: nobody knew of it ahead.
    """

    def __init__(
        self,
        client: ServiceClient,
        plan: SessionPlan,
        start: Resumed,
        source: PullSource,
        clock: TrainClock,
        meter: StepMeter,
    ) -> None:
        self._client, self._run_id, self._term = client, plan.run_id, start.term
        self._clock, self._meter = clock, meter
        self._next = PullKey(start.next_step)
        self._lacking: PullKey | None = None
        """First micro-batch that makes up for rejected groups of a step whose micro-batches are taken one by one."""
        options = plan.options
        self._direct = Puller(source, clock, options.pull_timeout_s)
        self._puller: Puller | Prefetcher = self._direct
        if plan.prefetch:
            self._puller = Prefetcher(
                source,
                clock,
                options.pull_timeout_s,
                prefetch=plan.prefetch,
                max_bytes=options.max_prefetch_bytes,
            )

    @property
    def next(self) -> PullKey:
        """Key of the micro-batch that follows those that came."""
        return self._next

    @property
    def is_amid_step(self) -> bool:
        """True when a part of a step came and more of it is to come."""
        return self._next.micro_batch > 0 or self._lacking is not None

    def skip_to(self, step: int) -> None:
        """Go on with `step`: another process pulled those before it."""
        self._next = PullKey(step)

    def stop(self) -> None:
        """End the background pulls."""
        self._puller.stop()

    def take(self) -> Batch | None:
        """Take the next micro-batch; None when no more comes. Raises what `Puller.take` raises."""
        lacking = self._lacking
        if lacking is not None and lacking <= self._next:
            batch = self._direct.take(lacking)
        else:
            batch = self._puller.take(self._next)
            while batch is not None and PullKey.of(batch) < self._next:
                # It was pulled here already, in place of rejected groups.
                batch = self._puller.take(self._next)
        if batch is None:
            self._lacking = None
            return None
        self._next = max(self._next, PullKey.after(batch))
        if lacking is not None and PullKey.of(batch) >= lacking:
            self._lacking = None if batch.final else PullKey.after(batch)
        elif lacking is not None and batch.final:
            # It was the last one when it was pulled.
            batch = replace(batch, info=replace(batch.info, final=False))
        return batch

    def give_back(
        self,
        batch: Batch,
        group_ids: Sequence[str],
        reason: str,
        barrier: Callable[[], object] | None,
        *,
        others: bool,
        is_whole: bool,
    ) -> Batch:
        """Give groups of the batch in hand back; return it without them, as `TrainerSession.reject` does."""
        now = self._reject(batch.step, group_ids, reason)
        if barrier is not None:
            barrier()
            now = self._reject(batch.step, (), reason)
        kept = without(batch, frozenset(group_ids), now.info)
        self._meter.rejected(kept, frozenset(group_ids))
        if not others:
            return replace(kept, info=replace(kept.info, final=True))
        if is_whole:
            return self._made_up(kept, now)
        if now.missing_groups and (self._lacking is None or self._lacking.step != batch.step):
            self._lacking = PullKey(batch.step, now.info.micro_batch + 1)
            self._clock.take_back(batch.step)
        return kept

    def _reject(self, step: int, group_ids: Sequence[str], reason: str) -> Rejected:
        """Give groups of a step back, or none, and say how the step stands."""
        parts = [group_ids[first : first + MAX_REJECTED] for first in range(0, len(group_ids), MAX_REJECTED)] or [()]
        said = [
            self._client.reject(self._run_id, term=self._term, step=step, group_ids=part, reason=reason)
            for part in parts
        ]
        return said[-1]

    def _made_up(self, kept: Batch, now: Rejected) -> Batch:
        """Pull what makes a whole batch whole again."""
        key, parts = PullKey(kept.step, kept.micro_batch + 1), [kept]
        while not parts[-1].final:
            more = self._direct.take(key)
            if more is None:
                logger.warning("step %d lacks %d groups, and no others come", kept.step, now.missing_groups)
                break
            self._meter.got(more)
            parts.append(more)
            key = PullKey.after(more)
        return joined(parts)
