"""Single-turn generation: the samples of one group as one batched engine call, resumed until all are finished.

Finished samples are kept, partial ones go on with prompt + partial as input and what is left of max_new_tokens. What
fails is tried again alone, sample by sample, as often as `Attempts` allows: one bad answer, or a call that a batch's
single bad request took with it, costs no sibling.
"""

import asyncio
import time

import numpy as np
import structlog

from buffer_wire.errors import InvalidField
from rollout_workers.attempts import Attempts
from rollout_workers.engine.errors import EngineError, EngineTimeout, EngineUnavailable
from rollout_workers.engine.types import GeneratedSample, SampleRequest
from rollout_workers.errors import GenerationFailed, SamplesFailed
from rollout_workers.prompts import check_prompt
from rollout_workers.samples import GroupProgress
from rollout_workers.slot import EngineSlot

_EMPTY_CALLS = 20
"""Engine calls in a row that may come back without a token: aborted in the queue by somebody else, or by a pause."""

_CATCH_UP_S = 60.0
"""How long partial work waits for an engine that is still behind the weights that began it."""

_VERDICT_S = 15.0
"""How long a sample that failed waits to hear whether its engine is gone."""

_log = structlog.get_logger()


class SingleTurn:
    """Generates what is unfinished of one group on one engine. `stop` ends it early, with what there is."""

    def __init__(self, progress: GroupProgress, slot: EngineSlot, attempts: Attempts, *, timeout_s: float) -> None:
        self.progress = progress
        self._slot = slot
        self._attempts = attempts
        self._timeout_s = timeout_s
        self._limit = 0
        self._stopped = False
        self._rids: set[str] = set()

    async def run(self) -> bool:
        """True when all samples are finished, False when `stop` or a quarantine came first.

        Raises InvalidField (prompt or sampling), SamplesFailed; `progress` then holds what is known.
        """
        self._limit = check_prompt(self.progress.prompt_ids, self.progress.task, self._slot.info)
        await self._wait_for_weights()
        await self._go_on(self.progress.unfinished)
        unfinished = self.progress.unfinished
        given_up = self._attempts.given_up
        if unfinished and given_up.keys() >= set(unfinished):
            raise SamplesFailed(self.progress.lease.lease_id, {i: given_up[i] for i in unfinished})
        return not unfinished

    async def stop(self) -> None:
        """End the engine's requests; `run` returns with what they have. Raises EngineError."""
        self._stopped = True
        self._slot.changes.notify()
        if self._rids:
            await self._slot.engine.abort(sorted(self._rids))

    @property
    def _ended(self) -> bool:
        return self._stopped or self._slot.quarantined

    # ── generating and trying again ──────────────────────────────────────────

    async def _go_on(self, indices: list[int]) -> None:
        """Generate these samples together until each is finished or given up, or the turn has ended."""
        deadline = time.monotonic() + self._timeout_s
        failed: dict[int, Exception] = {}
        empty_calls = 0
        while not (failed or self._ended) and (requests := self._requests(indices)):
            before = self.progress.tokens_of(indices)
            failed = await self._call(requests, deadline - time.monotonic())
            empty_calls = empty_calls + 1 if self.progress.tokens_of(indices) == before else 0
            if empty_calls == _EMPTY_CALLS:
                why = f"{empty_calls} engine calls in a row were aborted without a token"
                failed = {request.sample_index: self._failure(why) for request in requests}
        if failed and not self._ended:
            self._say(failed)
            rest = [i for i in indices if i not in failed and self.progress.samples[i].finish is None]
            async with asyncio.TaskGroup() as group:
                for index, error in failed.items():
                    group.create_task(self._try_again(index, error, final=empty_calls == _EMPTY_CALLS))
                if rest:
                    group.create_task(self._go_on(rest))

    async def _call(self, requests: list[SampleRequest], left_s: float) -> dict[int, Exception]:
        """One engine call; the samples that failed in it, with their errors."""
        if left_s <= 0:
            why = f"{len(requests)} samples were not finished in {self._timeout_s:g} s"
            return {request.sample_index: self._failure(why) for request in requests}
        rids = {request.rid for request in requests}
        self._rids |= rids
        try:
            failed = self._take(await self._slot.engine.generate(requests, deadline_s=left_s))
            for error in failed.values():
                self._slot.failed(error)
        except (EngineError, InvalidField) as raised:
            if isinstance(raised, EngineError):
                self._slot.failed(raised, suspect=isinstance(raised, EngineUnavailable | EngineTimeout))
            failed = {request.sample_index: raised for request in requests}
        finally:
            self._rids -= rids
        return failed

    async def _try_again(self, index: int, error: Exception, *, final: bool) -> None:
        """A sample has failed: go on with it alone, if it may be, and if its engine is still there."""
        final = final or isinstance(error, InvalidField)
        if not self._attempts.failed(index, error, final=final):
            return
        await self._slot.changes.until(lambda: self._ended, self._attempts.wait_s(index))
        if not self._ended and not await self._engine_is_fit():
            self._attempts.failed(index, error, final=True)
            return
        self._attempts.again += 1
        await self._go_on([index])

    def _say(self, failed: dict[int, Exception]) -> None:
        first = min(failed)
        lease = self.progress.lease.lease_id
        _log.warning("samples failed", lease=lease, samples=sorted(failed), error=str(failed[first]))

    async def _engine_is_fit(self) -> bool:
        """False when the engine is gone: then others are to finish the work."""
        slot = self._slot
        await slot.changes.until(lambda: slot.leasable or not slot.reachable or self._ended, _VERDICT_S)
        return slot.leasable

    # ── requests and answers ─────────────────────────────────────────────────

    def _requests(self, indices: list[int]) -> list[SampleRequest]:
        """A request for each of these samples that goes on; one that has reached its limit is finished here."""
        sampling, prompt = self.progress.task.sampling, self.progress.prompt_ids
        requests = []
        for i in indices:
            sample = self.progress.samples[i]
            if sample.finish is not None:
                continue
            full = len(sample) and len(prompt) + len(sample) > self._slot.info.max_input_tokens
            if len(sample) >= self._limit or full:
                sample.finish = "length"
                continue
            requests.append(
                SampleRequest(
                    sample_index=i,
                    input_ids=np.concatenate([prompt, sample.output_ids]) if len(sample) else prompt,
                    max_new_tokens=self._limit - len(sample),
                    temperature=_given(sampling.HasField("temperature"), sampling.temperature, 1.0),
                    top_p=_given(sampling.HasField("top_p"), sampling.top_p, 1.0),
                    top_k=sampling.top_k if sampling.HasField("top_k") else 0,
                    stop_token_ids=tuple(sampling.stop_token_ids),
                    stop=tuple(sampling.stop),
                )
            )
        return requests

    def _take(self, done: list[GeneratedSample]) -> dict[int, Exception]:
        """Keep what was generated; the samples whose answers cannot be used, with the reasons."""
        failed: dict[int, Exception] = {}
        for new in done:
            sample = self.progress.samples[new.sample_index]
            why = new.fault
            if not why:
                try:
                    sample.append(new, self._slot.version_of)
                except ValueError as error:
                    # What it had cannot be gone on with.
                    sample.clear()
                    why = str(error)
            if sample.finish is not None and not len(sample):
                sample.clear()
                why = "it ended without a token"
            if why:
                failed[new.sample_index] = self._failure(f"sample {new.sample_index}: {why}")
        return failed

    def _failure(self, why: str) -> GenerationFailed:
        return GenerationFailed(self.progress.lease.lease_id, why)

    async def _wait_for_weights(self) -> None:
        """Versions within a sample must not fall: wait for the engine to catch up, or start those samples anew."""
        newest = self.progress.newest
        if newest is None or self._slot.loaded >= newest:
            return
        caught_up = await self._slot.changes.until(lambda: self._slot.loaded >= newest or self._stopped, _CATCH_UP_S)
        if not caught_up:
            for i in self.progress.unfinished:
                self.progress.samples[i].clear()
            _log.warning(
                "partial samples started anew",
                lease=self.progress.lease.lease_id,
                why=f"engine {self._slot.engine_id} stays at {self._slot.loaded}, they reach {newest}",
            )


def _given(present: bool, value: float, default: float) -> float:  # noqa: FBT001 - a field's presence
    # float32 on the wire: 0.7 arrives as 0.69999999, which is 0.7 to 7 digits.
    return float(f"{value:.7g}") if present else default
