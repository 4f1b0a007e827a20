"""Single-turn generation: the samples of one group as one batched engine call, resumed until all are finished.

Where another engine of the worker is idle, half of the samples may begin there, or the last ones go on there
(generation/spread.py). What is not finished there comes back.

Finished samples are kept, partial ones go on with prompt + partial as input and what is left of max_new_tokens. What
fails is tried again alone, sample by sample, as often as `Attempts` allows: one bad answer, or a call that a batch's
single bad request took with it, costs no sibling.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import structlog

from rollout_workers.changes import Changes
from rollout_workers.engine.errors import EngineError
from rollout_workers.engine.types import SampleRequest, nobody_waits
from rollout_workers.errors import SamplesFailed
from rollout_workers.generation.attempts import Attempts
from rollout_workers.generation.engine_calls import EMPTY_CALLS, EngineCalls
from rollout_workers.generation.prompts import check_prompt
from rollout_workers.generation.samples import GroupProgress
from rollout_workers.generation.sampling import request_of
from rollout_workers.generation.spread import MOST_MOVES, Part, Spread
from rollout_workers.slots.slot import EngineSlot

FAILURES_WITH_IMAGES = 2
"""Failures of a sample with images after which it begins anew, in place of going on from what it has."""

_log = structlog.get_logger()


class SingleTurn:
    """Generates what is unfinished of one group. `stop` ends it early, with what there is.

    `slot`: the engine of the lease. `spread`: others may take samples over.
    """

    def __init__(
        self,
        progress: GroupProgress,
        slot: EngineSlot,
        attempts: Attempts,
        *,
        timeout_s: float,
        on_freed: Callable[[], None] = nobody_waits,
        spread: Spread | None = None,
    ) -> None:
        self.progress = progress
        self._slot = slot
        self._attempts = attempts
        self._on_freed = on_freed
        self._changes = Changes()
        """Changes of what has ended in calls, and of what these have brought."""
        self._home = EngineCalls(progress, slot, attempts, on_freed=self._freed)
        self._all_calls = {slot: self._home}
        """Calls by engine."""
        self._spread = spread
        self._away: set[int] = set()
        """Samples that run on another engine than the lease's."""
        self._moves: Counter[int] = Counter()
        self._timeout_s = timeout_s
        self._limit = 0

    @property
    def running(self) -> int:
        """Samples that hold a slot of the lease's engine: those that are unfinished there, as far as is known."""
        unfinished, ended = self.progress.unfinished, self._home.ended_early
        # What has ended is unfinished until its call returns. Asked for at every end of a sample: no sets for nothing.
        return len(unfinished) - len(ended) if not self._away else len(set(unfinished) - self._away - ended)

    async def run(self) -> bool:
        """True when all samples are finished, False when `stop` or a quarantine came first.

        Raises InvalidField (prompt or sampling), SamplesFailed; `progress` then holds what is known.
        """
        self._limit = check_prompt(self.progress.prompt_ids, self.progress.task, self._slot.info)
        for i in self.progress.unfinished:
            sample = self.progress.samples[i]
            if sample.turns or sample.prompt_ids is not None or sample.rows:
                # The work of a rollout function, which this worker does not have.
                self.progress.start_anew(i, "another_function")
        await self._home.wait_for_weights(self.progress.unfinished)
        at_home, elsewhere, other = self._begin(self.progress.unfinished)
        async with asyncio.TaskGroup() as group:
            making = [group.create_task(self._go_on(at_home, self._home))]
            if elsewhere:
                making.append(group.create_task(self._go_on(elsewhere, other)))
            if self.progress.surplus:
                watching = group.create_task(self._end_surplus())
                await asyncio.wait(making)
                watching.cancel()
        if self.progress.surplus and self.progress.is_complete:
            return True
        unfinished = self.progress.unfinished
        given_up = self._attempts.given_up
        if unfinished and given_up.keys() >= set(unfinished):
            raise SamplesFailed(self.progress.lease.lease_id, {i: given_up[i] for i in unfinished})
        return not unfinished

    async def stop(self) -> None:
        """End the engines' requests; `run` returns with what they have. Raises EngineError."""
        ends = await asyncio.gather(*(calls.stop() for calls in self._all_calls.values()), return_exceptions=True)
        for error in ends:
            if error is not None:
                raise error

    def _begin(self, indices: list[int]) -> tuple[list[int], list[int], EngineCalls]:
        """Samples that begin or go on here, those that begin elsewhere, and the calls for these."""
        new = [i for i in indices if not len(self.progress.samples[i])]
        if self._spread is None or len(new) < 2 or self._home.ended:
            return indices, [], self._home
        slot = self._spread.elsewhere(self.progress, self._slot, self._requests(new))
        if slot is None:
            return indices, [], self._home
        away = new[len(new) - len(new) // 2 :]
        self._take_away(away, slot)
        self._spread.moved(self.progress, self._slot, slot, len(away))
        return [i for i in indices if i not in away], away, self._all_calls[slot]

    def _take_away(self, indices: Iterable[int], slot: EngineSlot) -> None:
        """Have these samples go on at an engine."""
        if slot not in self._all_calls:
            self._all_calls[slot] = EngineCalls(self.progress, slot, self._attempts, on_freed=self._freed)
        self._moves.update(indices)
        if slot is self._slot:
            self._away.difference_update(indices)
        else:
            self._away.update(indices)
        self._on_freed()

    async def _go_on(self, indices: list[int], calls: EngineCalls) -> None:
        """Generate these samples together until each is finished or given up, or the turn has ended."""
        deadline = time.monotonic() + self._timeout_s
        failed: dict[int, Exception] = {}
        empty_calls = 0
        while not failed:
            await self._changes.until(self._is_read)
            if self._is_done() or not (requests := self._requests(indices)):
                break
            calls = await self._calls_that_may(calls, [request.sample_index for request in requests])
            if calls.ended:
                break
            before = self.progress.tokens_of(indices)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                late = calls.failure(f"{len(requests)} samples were not finished in {self._timeout_s:g} s")
                failed = {request.sample_index: late for request in requests}
                break
            failed, target = await self._call(calls, requests, left_s)
            empty_calls = empty_calls + 1 if self.progress.tokens_of(indices) == before and target is None else 0
            if empty_calls == EMPTY_CALLS:
                why = f"{empty_calls} engine calls in a row were aborted without a token"
                failed = {request.sample_index: calls.failure(why) for request in requests}
            if target is not None:
                calls = self._all_calls[target]
        if failed and not (self._home.ended or self._is_done()):
            calls.say(failed)
            rest = [i for i in indices if i not in failed and self.progress.samples[i].finish is None]
            self._away.difference_update(failed)
            async with asyncio.TaskGroup() as group:
                for index, error in failed.items():
                    group.create_task(self._try_again(index, error, calls, final=empty_calls == EMPTY_CALLS))
                if rest:
                    group.create_task(self._go_on(rest, calls))

    def _is_done(self) -> bool:
        return self.progress.surplus > 0 and self.progress.is_complete

    def _may_be_done(self) -> bool:
        """True when so many samples have ended, in calls that have not returned too, that the group may be complete."""
        surplus = self.progress.surplus
        ended = sum(len(calls.ended_early) for calls in self._all_calls.values())
        return surplus > 0 and len(self.progress.unfinished) - ended <= surplus

    def _is_read(self) -> bool:
        """False while the group may be complete by what calls have not brought yet."""
        return self._is_done() or not self._may_be_done()

    def _freed(self) -> None:
        self._changes.notify()
        self._on_freed()

    async def _end_surplus(self) -> None:
        """End what still runs when enough samples have ended; returns when the group is complete."""
        while True:
            await self._changes.until(self._may_be_done)
            for calls in self._all_calls.values():
                try:
                    await calls.abort()
                except EngineError as error:
                    _log.warning("surplus runs on", engine=calls.slot.engine_id, error=str(error))
            await self._changes.until(self._is_read)
            if self._is_done():
                return

    async def _call(
        self, calls: EngineCalls, requests: list[SampleRequest], left_s: float
    ) -> tuple[dict[int, Exception], EngineSlot | None]:
        """Make one engine call; the samples that failed, and the engine on which the others are to go on, if moved."""
        if self._spread is None:
            failed = await calls.make(requests, left_s)
            self._changes.notify()
            return failed, None
        may_move = all(self._moves[request.sample_index] < MOST_MOVES for request in requests)
        part = Part(self.progress, calls.slot, requests, is_guest=calls is not self._home, may_move=may_move)
        with self._spread.under_way(part):
            failed = await calls.make(requests, left_s, on_end=part.ended)
        self._changes.notify()
        open_now = set(self.progress.unfinished) - failed.keys()
        left = [request.sample_index for request in requests if request.sample_index in open_now]
        if part.target is None or not left or self._home.ended:
            return failed, None
        self._take_away(left, part.target)
        self._spread.moved(self.progress, calls.slot, part.target, len(left))
        return failed, part.target

    async def _calls_that_may(self, calls: EngineCalls, indices: list[int]) -> EngineCalls:
        """The calls that go on with these samples: at home where they cannot on the other engine, any more."""
        slot, newest = calls.slot, self.progress.newest_of(indices)
        can = not calls.ended and slot.leasable and (newest is None or slot.loaded >= newest)
        if calls is self._home or can:
            return calls
        self._away.difference_update(indices)
        await self._home.wait_for_weights(indices)
        return self._home

    async def _try_again(self, index: int, error: Exception, calls: EngineCalls, *, final: bool) -> None:
        """Go on alone and at home with a sample that has failed in `calls`, if it may be."""
        if await self._home.may_try_again(index, error, final=final):
            if self.progress.images and self._attempts.failures(index) >= FAILURES_WITH_IMAGES:
                # Servers make text of the token ids of a prompt with images, and may fail where what was made is in it.
                self.progress.start_anew(index, "images_refused")
            if calls is not self._home:
                await self._home.wait_for_weights([index])
            await self._go_on([index], self._home)

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
