"""Generation by a rollout function: the samples of one group side by side on one engine, each by a call of its own. All
rows of a sample are one function's.

What fails is tried again alone, as often as `Attempts` allows: a function that raises begins anew, one that ran out of
time goes on from its turns if it is resumable. Invariants: when `run` has ended, every sample is finished, or
unfinished with turns that a resumable function can go on from, or empty; a sample whose engine call failed for good
fails, whatever the function made of the error.
"""

import asyncio
import time
from collections.abc import Callable

import structlog

from rollout_workers.counters import describe
from rollout_workers.engine.types import nobody_waits
from rollout_workers.episode import Episode
from rollout_workers.errors import (
    EpisodeFull,
    PolicyError,
    PromptRefused,
    RolloutFailed,
    SamplesFailed,
    retry_after_s_of,
)
from rollout_workers.functions import Rollout
from rollout_workers.generation.attempts import Attempts
from rollout_workers.generation.engine_calls import EngineCalls
from rollout_workers.generation.prompts import Prompts, Tokenizer, check_prompt
from rollout_workers.generation.samples import GroupProgress
from rollout_workers.slots.slot import EngineSlot

_LATE_S = 1.0
"""Time between a function's deadline and its cancellation: until then it learns from `generate`, whose tokens are
kept."""

_log = structlog.get_logger()


class Episodes:
    """Generates what is unfinished of one group on one engine. `stop` ends it early, with what there is."""

    def __init__(
        self,
        progress: GroupProgress,
        slot: EngineSlot,
        attempts: Attempts,
        *,
        rollout: Rollout,
        prompts: Prompts,
        timeout_s: float,
        on_freed: Callable[[], None] = nobody_waits,
    ) -> None:
        self.progress = progress
        self._slot = slot
        self._attempts = attempts
        self._calls = EngineCalls(progress, slot, attempts)
        self._on_freed = on_freed
        self._rollout = rollout
        self._prompts = prompts
        self._timeout_s = timeout_s

    @property
    def running(self) -> int:
        """Samples that hold a slot of the engine: between its turns a sample keeps it."""
        return len(self.progress.unfinished)

    async def run(self) -> bool:
        """True when all samples are finished, False when `stop` or a quarantine came first.

        Raises InvalidField (prompt or sampling), SamplesFailed; `progress` then holds what is known.
        """
        check_prompt(self.progress.prompt_ids, self.progress.task, self._slot.info)
        self._drop_what_cannot_go_on()
        await self._calls.wait_for_weights(self.progress.unfinished)
        tokenizer = await self._prompts.tokenizer_or_refusal(self.progress.task.task_id)
        try:
            async with asyncio.TaskGroup() as group:
                making = [group.create_task(self._make(i, tokenizer)) for i in self.progress.unfinished]
                if making:
                    watching = group.create_task(self._cancel_at_end(making))
                    await asyncio.wait(making)
                    watching.cancel()
        finally:
            self._drop_what_cannot_go_on()
        unfinished = self.progress.unfinished
        given_up = self._attempts.given_up
        if unfinished and given_up.keys() >= set(unfinished):
            raise SamplesFailed(self.progress.lease.lease_id, {i: given_up[i] for i in unfinished})
        return not unfinished

    async def stop(self) -> None:
        """End the engine's requests and the functions; `run` returns with what they have. Raises EngineError."""
        await self._calls.stop()

    async def _cancel_at_end(self, making: list[asyncio.Task[None]]) -> None:
        """Cancel the functions once nothing more may be generated, and what was under way has come back."""
        changes = self._slot.changes
        await changes.until(lambda: self._calls.ended)
        await changes.until(lambda: not self._calls.under_way)
        for task in making:
            task.cancel()

    async def _make(self, index: int, tokenizer: Tokenizer | PromptRefused) -> None:
        """Make one sample, trying again as long as it may be."""
        calls = self._calls
        while not calls.ended:
            episode = Episode(index, calls, self._prompts, tokenizer, deadline=time.monotonic() + self._timeout_s)
            error = await self._call(episode)
            if error is None:
                self._on_freed()
                return
            if isinstance(error, RolloutFailed) or not self._rollout.resumable:
                self.progress.start_anew(index, "rollout_failed")
            if index in self._attempts.given_up:
                return
            calls.say({index: error})
            if not await calls.may_try_again(index, error, final=False):
                return

    async def _call(self, episode: Episode) -> Exception | None:
        """Call the function once; what went wrong, or None when the sample is finished."""
        limit = asyncio.timeout(self._timeout_s + _LATE_S)
        reward: object = None
        error: Exception | None = None
        try:
            async with limit:
                reward = await self._rollout.function(episode)
        except PolicyError as named:
            reward = named
        except EpisodeFull as full:
            error = None if full in episode.rows.ran_full else self._failed(episode, describe(full))
        except Exception as raised:  # noqa: BLE001 - the user's code may raise anything
            if isinstance(raised, TimeoutError) and limit.expired():
                error = self._calls.failure(
                    f"sample {episode.sample_index} was not finished in {self._timeout_s:g} s: rollout function "
                    f"{self._rollout.name} was cancelled"
                )
            else:
                error = self._failed(episode, describe(raised), retry_after_s_of(raised))
        failure = episode.rows.failure
        await episode.rows.close()
        if failure is not None:
            return failure
        if error is None and (wrong := episode.rows.conclude(reward)):
            error = self._failed(episode, wrong)
        return error

    def _failed(self, episode: Episode, why: str, retry_after_s: float = 0.0) -> RolloutFailed:
        return RolloutFailed(self._rollout.name, episode.sample_index, why, retry_after_s=retry_after_s)

    def _drop_what_cannot_go_on(self) -> None:
        if not self._rollout.resumable:
            for i in self.progress.unfinished:
                self.progress.start_anew(i, "not_resumable")
