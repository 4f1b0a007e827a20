"""Rewards: the user's function, called for every finished sample to which no rollout function has given one.

The function is named `module:function` and takes one RewardInput:

    def reward(sample: RewardInput) -> float | Mapping[str, object]: ...
    async def reward(sample: RewardInput) -> float | Mapping[str, object]: ...

A function with the attribute `rows = True` is asked for samples of several rows, too; it gives one reward for all of
them. A mapping has the number as `reward`; whatever else is in it becomes a column of the group (generation/given.py).
A raised PolicyError is as good as its result, and names what is wrong; anything else that is raised is a failure.
A coroutine function runs on the worker's event loop and must not block it. A plain one runs in a thread, the samples of
a group one after another, so it may compute; it must be safe to call from several threads. With reward_processes it
runs in processes of its own instead (rewarding/processes.py), one sample at a time in each. The result must be finite.
A sample for which it raises, or takes too long, is asked for again, and then generated again, as often as the worker's
max_sample_attempts allows; the rewards of its siblings are kept. The timeout of a plain function in a thread is that of
all samples that were given to the thread together; in all other cases each sample has its own.
"""

import asyncio
import inspect
import json
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from buffer_wire.errors import InvalidField
from rollout_workers.counters import describe
from rollout_workers.errors import PolicyError, PromptRefused, RewardFailed, retry_after_s_of
from rollout_workers.functions import is_coroutine, load
from rollout_workers.generation.columns.given import Columns, per_sample, ragged, returned
from rollout_workers.generation.prompts import Prompts
from rollout_workers.generation.sample import TokenIds
from rollout_workers.generation.samples import ROW_STRIDE, GroupProgress
from rollout_workers.reward_inputs import RewardInput, RewardTurn
from rollout_workers.rewarding.processes import RewardProcesses
from rollout_workers.rewarding.threads import RewardThreads

__all__ = [
    "RewardFunction",
    "RewardInput",
    "RewardTurn",
    "Scorer",
    "Scores",
    "load_reward",
    "per_sample",
    "ragged",
]

Result: TypeAlias = float | Mapping[str, object]
RewardFunction: TypeAlias = Callable[[RewardInput], Result | Awaitable[Result]]


def load_reward(name: str) -> RewardFunction:
    """Import `module:function`. Raises InvalidField."""
    return load("reward", name)


def no_reward(sample: RewardInput) -> float:
    """Raise RewardFailed: the worker has no reward function, and the rollout function has to give every reward."""
    why = "the rollout function returned None (or let EpisodeFull pass), and the worker has no reward function"
    raise RewardFailed("(none)", sample.sample_index, why)


@dataclass(frozen=True, slots=True)
class Scores:
    """Rewards, and what went wrong, by the sample's index; every sample that was asked for is in one of them."""

    rewards: Mapping[int, float]
    failures: Mapping[int, RewardFailed]
    columns: Mapping[int, Columns] = field(default_factory=dict)
    """Columns that came with rewards."""
    named: Mapping[int, str] = field(default_factory=dict)
    """Names of what is wrong with samples that have a reward."""


@dataclass(frozen=True, slots=True)
class _Score:
    reward: float
    columns: Columns
    failure: str


Results: TypeAlias = dict[int, _Score | RewardFailed]


class Scorer:
    """Rewards for groups."""

    def __init__(
        self,
        function: RewardFunction,
        prompts: Prompts,
        *,
        name: str,
        timeout_s: float,
        threads: int,
        decode: bool,
        processes: RewardProcesses | None = None,
    ) -> None:
        self._function = function
        self._prompts = prompts
        self._name = name
        self._timeout_s = timeout_s
        self._decode = decode
        """True when every response is decoded; otherwise only those of chat prompts are."""
        self._is_coroutine = is_coroutine(function)
        self._processes = processes
        """Processes in which the function runs; None: it runs in threads or on the event loop."""
        self._threads = RewardThreads(threads)

    async def score(self, progress: GroupProgress, indices: Sequence[int], *, timeout_s: float | None = None) -> Scores:
        """A reward for each of these samples, or why there is none, within `timeout_s` or else the worker's time.

        Raises RewardFailed when none can be asked for.
        """
        left_s = self._timeout_s if timeout_s is None else timeout_s
        results: Results = {}
        if not getattr(self._function, "rows", False):
            # It would judge a trajectory by its first row.
            results |= {i: self._of_rows(i, n) for i in indices if (n := len(progress.samples[i].rows))}
        try:
            async with asyncio.timeout(left_s):
                inputs = await self._inputs(progress, [i for i in indices if i not in results])
        except TimeoutError:
            raise self._too_late(None, left_s) from None
        if (processes := self._processes) is not None:
            await asyncio.gather(*(self._ask_process(processes, sample, results, left_s) for sample in inputs))
        elif self._is_coroutine:
            await asyncio.gather(*(self._ask(sample, results, left_s) for sample in inputs))
        else:
            await self._compute_in_thread(inputs, results, left_s)
        scored = {i: found for i in indices if isinstance(found := results.get(i), _Score)}
        return Scores(
            {i: found.reward for i, found in scored.items()},
            {i: found for i in indices if isinstance(found := results.get(i), RewardFailed)},
            {i: found.columns for i, found in scored.items()},
            {i: found.failure for i, found in scored.items() if found.failure},
        )

    async def close(self) -> None:
        """Let go of the threads, where one that hangs in a reward function is left behind, and end the processes."""
        self._threads.close()
        if self._processes is not None:
            await self._processes.close()

    async def _inputs(self, progress: GroupProgress, indices: Sequence[int]) -> list[RewardInput]:
        task = progress.task
        try:
            metadata = json.loads(task.metadata_json or "{}")
        except ValueError as error:
            raise RewardFailed(self._name, None, f"metadata_json is not JSON: {error}") from error
        # Rows of all samples, one behind the other.
        at = [i + number * ROW_STRIDE for i in indices for number in range(len(progress.samples[i].rows) + 1)]
        chosen = [progress.row(index) for index in at]
        notes = [note for sample in chosen for note in sample.turns]
        texts: list[str] | list[None] = [None] * (len(chosen) + len(notes))
        if self._decode or task.messages:
            parts = [sample.output_ids[note.start : note.end] for sample in chosen for note in sample.turns]
            texts = await self._texts(task.task_id, [*(sample.output_ids for sample in chosen), *parts])
        turn_texts = iter(texts[len(chosen) :])
        rows = [
            RewardInput(
                task_id=task.task_id,
                environment=task.environment,
                metadata=metadata,
                sample_index=i % ROW_STRIDE,
                prompt_ids=progress.prompt_of(i),
                response_ids=sample.output_ids,
                finish_reason="stop" if sample.finish == "stop" else "length",
                text=text,
                turns=tuple(
                    RewardTurn(note.role, sample.output_ids[note.start : note.end], next(turn_texts))
                    for note in sample.turns
                ),
                policy=sample.policy,
            )
            for i, sample, text in zip(at, chosen, texts, strict=False)
        ]
        of_sample = {i: [row for row in rows if row.sample_index == i] for i in indices}
        return [replace(first, rows=tuple(further)) for first, *further in of_sample.values()]

    async def _texts(self, task_id: str, responses: Sequence[TokenIds]) -> list[str]:
        try:
            tokenizer = await self._prompts.tokenizer(task_id)
        except PromptRefused as error:
            raise RewardFailed(self._name, None, str(error)) from error
        ids = [response.tolist() for response in responses]
        return await asyncio.to_thread(lambda: [tokenizer.decode(row, skip_special_tokens=True) for row in ids])

    async def _ask(self, sample: RewardInput, results: Results, timeout_s: float) -> None:
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                value: Any = self._function(sample)
                if inspect.isawaitable(value):
                    value = await value
            results[sample.sample_index] = self._checked(sample, value)
        except PolicyError as wrong:
            results[sample.sample_index] = self._checked_or_failed(sample, wrong)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            late = isinstance(error, TimeoutError) and limit.expired()
            results[sample.sample_index] = self._too_late(sample, timeout_s) if late else self._failed(sample, error)

    async def _ask_process(
        self, processes: RewardProcesses, sample: RewardInput, results: Results, timeout_s: float
    ) -> None:
        try:
            results[sample.sample_index] = self._checked(sample, await processes.ask(sample, timeout_s=timeout_s))
        except RewardFailed as error:
            results[sample.sample_index] = error

    async def _compute_in_thread(self, inputs: Sequence[RewardInput], results: Results, timeout_s: float) -> None:
        computed: Results = {}
        abandoned = threading.Event()
        try:
            async with asyncio.timeout(timeout_s):
                await self._threads.run(lambda: self._compute(inputs, computed, abandoned))
        except TimeoutError:
            pass
        finally:
            # The thread may still be in the function for the sample that took too long.
            abandoned.set()
            results.update(computed)
        for sample in inputs:
            results.setdefault(sample.sample_index, self._too_late(sample, timeout_s))

    def _compute(self, inputs: Sequence[RewardInput], computed: Results, abandoned: threading.Event) -> None:
        for sample in inputs:
            if abandoned.is_set():
                return
            try:
                computed[sample.sample_index] = self._checked(sample, self._function(sample))
            except PolicyError as wrong:
                computed[sample.sample_index] = self._checked_or_failed(sample, wrong)
            except Exception as error:  # noqa: BLE001 - the user's code may raise anything
                computed[sample.sample_index] = self._failed(sample, error)

    def _checked_or_failed(self, sample: RewardInput, wrong: PolicyError) -> _Score | RewardFailed:
        try:
            return self._checked(sample, wrong)
        except RewardFailed as error:
            return error

    def _failed(self, sample: RewardInput, error: Exception) -> RewardFailed:
        if isinstance(error, RewardFailed):
            return error
        return RewardFailed(self._name, sample.sample_index, describe(error), retry_after_s=retry_after_s_of(error))

    def _of_rows(self, index: int, further: int) -> RewardFailed:
        why = f"the sample has {further + 1} rows, and the function does not say that it looks at them (`rows = True`)"
        return RewardFailed(self._name, index, why)

    def _too_late(self, sample: RewardInput | None, timeout_s: float) -> RewardFailed:
        index = None if sample is None else sample.sample_index
        return RewardFailed(self._name, index, f"no result within {timeout_s:g} s")

    def _checked(self, sample: RewardInput, value: object) -> _Score:
        try:
            given = returned(value, prompt=len(sample.prompt_ids), response=len(sample.response_ids))
        except InvalidField as error:
            raise RewardFailed(self._name, sample.sample_index, str(error)) from error
        try:
            reward = float(given.reward)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            reward = math.nan
        if not math.isfinite(reward):
            lacks = given.reward is None and given.columns
            what = "no 'reward' among what it gave" if lacks else f"it gave {given.reward!r}"
            raise RewardFailed(self._name, sample.sample_index, f"{what}, not a finite number")
        return _Score(reward, given.columns, given.failure)
