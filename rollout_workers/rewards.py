"""Rewards: the user's function, called for every finished sample.

The function is named `module:function` and takes one RewardInput:

    def reward(sample: RewardInput) -> float: ...
    async def reward(sample: RewardInput) -> float: ...

A coroutine function runs on the worker's event loop and must not block it. A plain one runs in a thread, the samples of
a group one after another, so it may compute; it must be safe to call from several threads. The result must be finite.
A sample for which it raises, or takes too long, is asked for again, and then generated again, as often as the worker's
max_sample_attempts allows; the rewards of its siblings are kept. A plain function's timeout is that of all samples
that were given to the thread together.
"""

import asyncio
import importlib
import inspect
import json
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from buffer_wire.errors import InvalidField
from rollout_workers.counters import describe
from rollout_workers.errors import PromptRefused, RewardFailed
from rollout_workers.prompts import Prompts
from rollout_workers.samples import GroupProgress, TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class RewardInput:
    """One finished sample."""

    task_id: str
    environment: str
    metadata: Mapping[str, Any]
    """The task's metadata_json, parsed; empty when it is empty. The samples of a group share it: do not change it."""
    sample_index: int
    prompt_ids: TokenIds
    """int32 [p]."""
    response_ids: TokenIds
    """int32 [r], a stop token included."""
    finish_reason: Literal["stop", "length"]
    text: str | None
    """The response decoded without special tokens; None unless the worker was given a tokenizer, or the task came as
    messages."""


RewardFunction: TypeAlias = Callable[[RewardInput], float | Awaitable[float]]


def load_reward(name: str) -> RewardFunction:
    """Import `module:function`. Raises InvalidField."""
    module_name, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise InvalidField("reward", name, f"module:function that can be imported ({describe(error)})") from error
    if not callable(found):
        raise InvalidField("reward", name, f"a function; it is a {type(found).__name__}")
    reward: RewardFunction = found
    return reward


@dataclass(frozen=True, slots=True)
class Scores:
    """Rewards, and what went wrong, by the sample's index; every sample that was asked for is in one of them."""

    rewards: Mapping[int, float]
    failures: Mapping[int, RewardFailed]


Results: TypeAlias = dict[int, float | RewardFailed]


class Scorer:
    """Rewards for groups."""

    def __init__(
        self, function: RewardFunction, prompts: Prompts, *, name: str, timeout_s: float, threads: int, decode: bool
    ) -> None:
        self._function = function
        self._prompts = prompts
        self._name = name
        self._timeout_s = timeout_s
        self._decode = decode
        """True: every response is decoded; otherwise only those of chat prompts."""
        self._is_coroutine = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
        )
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="reward")

    async def score(self, progress: GroupProgress, indices: Sequence[int]) -> Scores:
        """A reward for each of these samples, or why there is none. Raises RewardFailed when none can be asked for."""
        try:
            async with asyncio.timeout(self._timeout_s):
                inputs = await self._inputs(progress, indices)
        except TimeoutError:
            raise self._too_late(None) from None
        results: Results = {}
        if self._is_coroutine:
            await asyncio.gather(*(self._ask(sample, results) for sample in inputs))
        else:
            await self._compute_in_thread(inputs, results)
        return Scores(
            {i: found for i in indices if isinstance(found := results.get(i), float)},
            {i: found for i in indices if isinstance(found := results.get(i), RewardFailed)},
        )

    def close(self) -> None:
        """Let go of the threads; one that hangs in a reward function is left behind."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _inputs(self, progress: GroupProgress, indices: Sequence[int]) -> list[RewardInput]:
        task = progress.task
        try:
            metadata = json.loads(task.metadata_json or "{}")
        except ValueError as error:
            raise RewardFailed(self._name, None, f"metadata_json is not JSON: {error}") from error
        chosen = [progress.samples[i] for i in indices]
        texts: list[str] | list[None] = [None] * len(chosen)
        if self._decode or task.messages:
            texts = await self._texts(task.task_id, [sample.output_ids for sample in chosen])
        return [
            RewardInput(
                task_id=task.task_id,
                environment=task.environment,
                metadata=metadata,
                sample_index=i,
                prompt_ids=progress.prompt_ids,
                response_ids=sample.output_ids,
                finish_reason="stop" if sample.finish == "stop" else "length",
                text=text,
            )
            for i, sample, text in zip(indices, chosen, texts, strict=True)
        ]

    async def _texts(self, task_id: str, responses: Sequence[TokenIds]) -> list[str]:
        try:
            tokenizer = await self._prompts.tokenizer(task_id)
        except PromptRefused as error:
            raise RewardFailed(self._name, None, str(error)) from error
        ids = [response.tolist() for response in responses]
        return await asyncio.to_thread(lambda: [tokenizer.decode(row, skip_special_tokens=True) for row in ids])

    async def _ask(self, sample: RewardInput, results: Results) -> None:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                value: Any = self._function(sample)
                if inspect.isawaitable(value):
                    value = await value
            results[sample.sample_index] = self._checked(sample, value)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            late = isinstance(error, TimeoutError) and limit.expired()
            results[sample.sample_index] = self._too_late(sample) if late else self._failed(sample, error)

    async def _compute_in_thread(self, inputs: Sequence[RewardInput], results: Results) -> None:
        computed: Results = {}
        abandoned = threading.Event()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                await loop.run_in_executor(self._threads, self._compute, inputs, computed, abandoned)
        except TimeoutError:
            pass
        finally:
            # The thread may still be in the function for the sample that took too long.
            abandoned.set()
            results.update(computed)
        for sample in inputs:
            results.setdefault(sample.sample_index, self._too_late(sample))

    def _compute(self, inputs: Sequence[RewardInput], computed: Results, abandoned: threading.Event) -> None:
        for sample in inputs:
            if abandoned.is_set():
                return
            try:
                computed[sample.sample_index] = self._checked(sample, self._function(sample))
            except Exception as error:  # noqa: BLE001 - the user's code may raise anything
                computed[sample.sample_index] = self._failed(sample, error)

    def _failed(self, sample: RewardInput, error: Exception) -> RewardFailed:
        return (
            error if isinstance(error, RewardFailed) else RewardFailed(self._name, sample.sample_index, describe(error))
        )

    def _too_late(self, sample: RewardInput | None) -> RewardFailed:
        index = None if sample is None else sample.sample_index
        return RewardFailed(self._name, index, f"no result within {self._timeout_s:g} s")

    def _checked(self, sample: RewardInput, value: object) -> float:
        try:
            reward = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            reward = math.nan
        if not math.isfinite(reward):
            raise RewardFailed(self._name, sample.sample_index, f"it gave {value!r}, not a finite number")
        return reward
