"""The engine calls of one group: what they bring is kept, what fails is told, and who may try again when.

Shared by the ways to make a group (rollout.py, episodes.py). Invariants: every token that a call brings is added to its
sample or counted as discarded; a call that failed with part of its answers keeps that part; after `stop`, or when the
engine is quarantined, nothing new is sent.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import structlog

from buffer_wire.engine_columns import ROUTED_EXPERTS
from buffer_wire.errors import InvalidField
from rollout_workers.engine.errors import EngineError, EngineMalformed, EngineTimeout, EngineUnavailable
from rollout_workers.engine.types import GeneratedSample, SampleRequest, nobody_waits
from rollout_workers.errors import GenerationFailed
from rollout_workers.generation.attempts import Attempts
from rollout_workers.generation.samples import GroupProgress
from rollout_workers.slots.slot import EngineSlot

EMPTY_CALLS = 20
"""Engine calls in a row that may come back without a token: aborted in the queue by somebody else, or by a pause."""

_CATCH_UP_S = 60.0
"""Longest wait of partial work for an engine that is still behind the weights that began it."""

_VERDICT_S = 15.0
"""Longest wait of a failed sample for the verdict whether its engine is gone."""

_log = structlog.get_logger()


class EngineCalls:
    """Calls for the samples of `progress` on the engine of `slot`. `on_freed` is called when one runs no longer."""

    def __init__(
        self,
        progress: GroupProgress,
        slot: EngineSlot,
        attempts: Attempts,
        *,
        on_freed: Callable[[], None] = nobody_waits,
    ) -> None:
        self.progress = progress
        self.slot = slot
        self._attempts = attempts
        self._on_freed = on_freed
        self._stopped = False
        self._rids: set[str] = set()
        self.ended_early: set[int] = set()
        """Samples that the engine has ended in calls whose other samples go on."""

    @property
    def ended(self) -> bool:
        """True when nothing more may be generated here."""
        return self._stopped or self.slot.quarantined

    @property
    def under_way(self) -> bool:
        """True while a call is unanswered."""
        return bool(self._rids)

    async def stop(self) -> None:
        """End the engine's requests, whose calls return with what they have. Raises EngineError."""
        self._stopped = True
        self.slot.changes.notify()
        await self.abort()

    async def abort(self) -> None:
        """End the engine's requests that are under way. Raises EngineError."""
        if self._rids:
            await self.slot.engine.abort(sorted(self._rids))

    async def make(
        self, requests: Sequence[SampleRequest], left_s: float, *, on_end: Callable[[int], None] = lambda _index: None
    ) -> dict[int, Exception]:
        """Make one engine call; returns the samples that failed in it, with their errors. Samples that the engine ends
        are finished; `on_end` is told the index of one that ends while others go on.
        """

        def ended(index: int) -> None:
            self.ended_early.add(index)
            on_end(index)
            self._on_freed()

        rids = {request.rid for request in requests}
        if ROUTED_EXPERTS in self.progress.task.columns:
            row = self.progress.row
            requests = [replace(one, experts_from=row(one.sample_index).positions_known) for one in requests]
        if (oldest := self.progress.oldest) is not None:
            label = self.slot.label_of(oldest)
            requests = [replace(one, begun_with=label) for one in requests]
        self._rids |= rids
        try:
            if self.progress.images:
                requests = [self.progress.with_images(one) for one in requests]
            failed = self._take(await self.slot.generate(requests, deadline_s=left_s, on_end=ended))
            for error in failed.values():
                self.slot.failed(error, doubted=True)
        except (EngineError, InvalidField) as raised:
            if isinstance(raised, EngineError):
                self.slot.failed(
                    raised,
                    suspect=isinstance(raised, EngineUnavailable | EngineTimeout),
                    doubted=isinstance(raised, EngineMalformed),
                )
            unusable = self._take(raised.partial if isinstance(raised, EngineError) else ())
            row = self.progress.row
            failed = {i: raised for one in requests if row(i := one.sample_index).finish is None} | unusable
        except asyncio.CancelledError:
            cut_off = self.slot.take_cut_off()
            self.progress.received += cut_off
            self.progress.discarded["cut_off"] += cut_off
            raise
        finally:
            self._rids -= rids
            self.ended_early.difference_update(request.sample_index for request in requests)
            self.slot.changes.notify()
        return failed

    async def may_try_again(self, index: int, error: Exception, *, final: bool) -> bool:
        """Note that a sample has failed, and wait until it may go on; False when it may not, or is not to."""
        if not self._attempts.failed(index, error, final=final or isinstance(error, InvalidField)):
            return False
        await self.slot.changes.until(lambda: self.ended, self._attempts.wait_s(index))
        if not self.ended and not await self._engine_is_fit():
            self._attempts.failed(index, error, final=True)
            return False
        self._attempts.again += 1
        return True

    async def wait_for_weights(self, indices: Sequence[int]) -> None:
        """Wait for the engine to catch up, or start these samples anew: versions within a sample must not fall."""
        newest, slot = self.progress.newest_of(indices), self.slot
        if newest is None or slot.loaded >= newest:
            return
        caught_up = await slot.changes.until(lambda: slot.loaded >= newest or self._stopped, _CATCH_UP_S)
        if not caught_up:
            for i in indices:
                self.progress.start_anew(i, "engine_behind")
            _log.warning(
                "partial samples started anew",
                lease=self.progress.lease.lease_id,
                why=f"engine {slot.engine_id} stays at {slot.loaded}, they reach {newest}",
            )

    def failure(self, why: str) -> GenerationFailed:
        """An error of this lease."""
        return GenerationFailed(self.progress.lease.lease_id, why)

    def say(self, failed: dict[int, Exception]) -> None:
        """Log that samples failed."""
        first = min(failed)
        lease = self.progress.lease.lease_id
        _log.warning("samples failed", lease=lease, samples=sorted(failed), error=str(failed[first]))

    async def _engine_is_fit(self) -> bool:
        """False when the engine is gone: then others are to finish the work."""
        slot = self.slot
        await slot.changes.until(
            lambda: slot.leasable or not slot.reachable or slot.breaker.is_open or self.ended, _VERDICT_S
        )
        return slot.leasable

    def _take(self, done: Collection[GeneratedSample]) -> dict[int, Exception]:
        """Keep what was generated; returns the samples whose answers cannot be used, with the reasons."""
        failed: dict[int, Exception] = {}
        for new in done:
            sample, index = self.progress.row(new.sample_index), new.sample_index
            self.progress.received += len(new.output_ids) + new.unusable_tokens
            self.progress.cached += new.cached_tokens
            why = new.fault or self.progress.odd_tokens(new)
            if unusable := new.unusable_tokens + (len(new.output_ids) if why else 0):
                self.progress.discarded["unusable_answer"] += unusable
            if not why:
                try:
                    sample.append(new, self.slot.version_of)
                except ValueError as error:
                    # What it had cannot be gone on with.
                    self.progress.discarded["version_fell"] += len(new.output_ids)
                    self.progress.clear_row(index, "version_fell")
                    why = str(error)
            if not why and sample.finish is not None and len(sample) == sample.noted:
                sample.finish = None
                why = "it ended without a token"
            if why:
                failed[index] = self.failure(f"sample {index}: {why}")
        return failed
