"""Single-turn generation: the samples of one group as one batched engine call, resumed until all are finished.

Finished samples are kept, partial ones go on with prompt + partial as input and what is left of max_new_tokens. What
fails is tried again alone, sample by sample, as often as `Attempts` allows: one bad answer, or a call that a batch's
single bad request took with it, costs no sibling.
"""

import asyncio
import time
from collections.abc import Callable

import numpy as np

from rollout_workers.engine.types import SampleRequest, nobody_waits
from rollout_workers.errors import SamplesFailed
from rollout_workers.generation.attempts import Attempts
from rollout_workers.generation.engine_calls import EMPTY_CALLS, EngineCalls
from rollout_workers.generation.prompts import check_prompt
from rollout_workers.generation.samples import GroupProgress
from rollout_workers.generation.sampling import request_of
from rollout_workers.slots.slot import EngineSlot


class SingleTurn:
    """Generates what is unfinished of one group on one engine. `stop` ends it early, with what there is."""

    def __init__(
        self,
        progress: GroupProgress,
        slot: EngineSlot,
        attempts: Attempts,
        *,
        timeout_s: float,
        on_freed: Callable[[], None] = nobody_waits,
    ) -> None:
        self.progress = progress
        self._slot = slot
        self._attempts = attempts
        self._calls = EngineCalls(progress, slot, attempts, on_freed=on_freed)
        self._timeout_s = timeout_s
        self._limit = 0

    @property
    def running(self) -> int:
        """Samples that hold a slot of the engine."""
        return self._calls.running

    async def run(self) -> bool:
        """True when all samples are finished, False when `stop` or a quarantine came first.

        Raises InvalidField (prompt or sampling), SamplesFailed; `progress` then holds what is known.
        """
        self._limit = check_prompt(self.progress.prompt_ids, self.progress.task, self._slot.info)
        for i in self.progress.unfinished:
            sample = self.progress.samples[i]
            if sample.turns or sample.prompt_ids is not None:
                # The work of a rollout function, which this worker does not have.
                self.progress.start_anew(i, "another_function")
        await self._calls.wait_for_weights()
        await self._go_on(self.progress.unfinished)
        unfinished = self.progress.unfinished
        given_up = self._attempts.given_up
        if unfinished and given_up.keys() >= set(unfinished):
            raise SamplesFailed(self.progress.lease.lease_id, {i: given_up[i] for i in unfinished})
        return not unfinished

    async def stop(self) -> None:
        """End the engine's requests; `run` returns with what they have. Raises EngineError."""
        await self._calls.stop()

    async def _go_on(self, indices: list[int]) -> None:
        """Generate these samples together until each is finished or given up, or the turn has ended."""
        calls = self._calls
        deadline = time.monotonic() + self._timeout_s
        failed: dict[int, Exception] = {}
        empty_calls = 0
        while not (failed or calls.ended) and (requests := self._requests(indices)):
            before = self.progress.tokens_of(indices)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                late = calls.failure(f"{len(requests)} samples were not finished in {self._timeout_s:g} s")
                failed = {request.sample_index: late for request in requests}
                break
            failed = await calls.make(requests, left_s)
            empty_calls = empty_calls + 1 if self.progress.tokens_of(indices) == before else 0
            if empty_calls == EMPTY_CALLS:
                why = f"{empty_calls} engine calls in a row were aborted without a token"
                failed = {request.sample_index: calls.failure(why) for request in requests}
        if failed and not calls.ended:
            calls.say(failed)
            rest = [i for i in indices if i not in failed and self.progress.samples[i].finish is None]
            async with asyncio.TaskGroup() as group:
                for index, error in failed.items():
                    group.create_task(self._try_again(index, error, final=empty_calls == EMPTY_CALLS))
                if rest:
                    group.create_task(self._go_on(rest))

    async def _try_again(self, index: int, error: Exception, *, final: bool) -> None:
        """Go on alone with a sample that has failed, if it may be."""
        if await self._calls.may_try_again(index, error, final=final):
            await self._go_on([index])

    def _requests(self, indices: list[int]) -> list[SampleRequest]:
        """A request for each of these samples that goes on; one that has reached its limit is finished here."""
        prompt = self.progress.prompt_ids
        requests = []
        for i in indices:
            sample = self.progress.samples[i]
            if sample.finish is not None:
                continue
            full = len(sample) and len(prompt) + len(sample) > self._slot.info.max_input_tokens
            if len(sample) >= self._limit or full:
                sample.finish = "length"
                continue
            input_ids = np.concatenate([prompt, sample.output_ids]) if len(sample) else prompt
            most = self._limit - len(sample)
            requests.append(request_of(self.progress.task, i, input_ids, most, generated=len(sample)))
        return requests
