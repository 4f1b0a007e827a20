"""Rewards: the user's function, called for every finished sample.

The function is named `module:function` and takes one RewardInput:

    def reward(sample: RewardInput) -> float: ...
    async def reward(sample: RewardInput) -> float: ...

A coroutine function runs on the worker's event loop and must not block it. A plain one runs in a thread, the samples of
a group one after another, so it may compute; it must be safe to call from several threads. The result must be finite.
What it raises, and a group that takes longer than the timeout, hands the task back as failed, with the error.
"""

import asyncio
import importlib
import inspect
import json
import math
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

    async def score(self, progress: GroupProgress) -> list[float]:
        """One finite reward for each sample, in order. Raises RewardFailed."""
        try:
            async with asyncio.timeout(self._timeout_s):
                inputs = await self._inputs(progress)
                if self._is_coroutine:
                    return list(await asyncio.gather(*(self._ask(sample) for sample in inputs)))
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, self._compute, inputs)
        except TimeoutError:
            why = f"no result for the group within {self._timeout_s:g} s"
            raise RewardFailed(self._name, None, why) from None

    def close(self) -> None:
        """Let go of the threads; one that hangs in a reward function is left behind."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _inputs(self, progress: GroupProgress) -> list[RewardInput]:
        task = progress.task
        try:
            metadata = json.loads(task.metadata_json or "{}")
        except ValueError as error:
            raise RewardFailed(self._name, None, f"metadata_json is not JSON: {error}") from error
        texts: list[str] | list[None] = [None] * len(progress.samples)
        if self._decode or task.messages:
            texts = await self._texts(progress)
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
            for i, (sample, text) in enumerate(zip(progress.samples, texts, strict=True))
        ]

    async def _texts(self, progress: GroupProgress) -> list[str]:
        try:
            tokenizer = await self._prompts.tokenizer(progress.task.task_id)
        except PromptRefused as error:
            raise RewardFailed(self._name, None, str(error)) from error
        ids = [sample.output_ids.tolist() for sample in progress.samples]
        return await asyncio.to_thread(lambda: [tokenizer.decode(row, skip_special_tokens=True) for row in ids])

    async def _ask(self, sample: RewardInput) -> float:
        try:
            value: Any = self._function(sample)
            if inspect.isawaitable(value):
                value = await value
        except Exception as error:  # The user's code may raise anything.
            raise RewardFailed(self._name, sample.sample_index, describe(error)) from error
        return self._checked(sample, value)

    def _compute(self, inputs: Sequence[RewardInput]) -> list[float]:
        rewards = []
        for sample in inputs:
            try:
                value = self._function(sample)
            except Exception as error:  # The user's code may raise anything.
                raise RewardFailed(self._name, sample.sample_index, describe(error)) from error
            rewards.append(self._checked(sample, value))
        return rewards

    def _checked(self, sample: RewardInput, value: object) -> float:
        try:
            reward = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            reward = math.nan
        if not math.isfinite(reward):
            raise RewardFailed(self._name, sample.sample_index, f"it gave {value!r}, not a finite number")
        return reward
