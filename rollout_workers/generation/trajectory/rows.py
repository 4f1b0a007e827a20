"""Rows of one sample, which its rollout function makes: the first, and those that it began."""

import asyncio
from collections.abc import Sequence
from typing import NoReturn, Protocol

from buffer_wire.errors import InvalidField
from rollout_workers.errors import EpisodeFull, PolicyError
from rollout_workers.generation.columns.given import Columns, is_finite, of_trajectory
from rollout_workers.generation.sample import SampleProgress
from rollout_workers.generation.samples import GroupProgress


class Row(Protocol):
    """A row as the others see it: `rollout_workers.episode.Episode`."""

    reward: float | None
    full: EpisodeFull | None

    @property
    def progress(self) -> SampleProgress:
        """Progress of it so far."""
        ...

    @property
    def generating(self) -> "asyncio.Task[object] | None":
        """Task that lets the model write, while one does."""
        ...

    def end(self, *, cut: bool, wrong: bool) -> str:
        """Fault of it now that the function has returned, or nothing. `cut`: nothing more fitted; `wrong`: the function
        has raised PolicyError.
        """
        ...

    def keep(self, result: object, shared: Columns) -> object:
        """Keep its columns, and those of `shared` that it lacks; returns its reward. Raises InvalidField."""
        ...

    def settle(self) -> None:
        """Make the row what it is for the trainer."""
        ...


class Rows:
    """Rows of one sample, of that index in its group, and what ended them all."""

    def __init__(self, progress: GroupProgress, sample: int) -> None:
        self._progress = progress
        self._sample = sample
        self.all: list[Row] = []
        """Rows, the sample's first one before the others."""
        self.failure: Exception | None = None
        """Error that ended the sample, whatever the function makes of it."""

    @property
    def ran_full(self) -> Sequence[EpisodeFull]:
        """Errors of the rows into which something did not fit."""
        return [row.full for row in self.all if row.full is not None]

    def fail(self, error: Exception) -> NoReturn:
        """End the sample by raising this error, whatever the function makes of it."""
        self.failure = error
        raise error

    async def close(self) -> None:
        """End what the function, which has ended, has left generating."""
        self.failure = self.failure or RuntimeError("the rollout function has ended")
        left = [row.generating for row in self.all if row.generating is not None]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)

    def conclude(self, result: object) -> str:
        """Take what the function returned, or its PolicyError; returns what is wrong with it, or nothing. Rows without
        a turn are left out.
        """
        first, *further = self.all
        further = [row for row in further if row.progress.turns]
        for row in (first, *further):
            if fault := row.end(cut=bool(self.ran_full), wrong=isinstance(result, PolicyError)):
                return fault if row is first else f"of row {self.all.index(row)}: {fault}"
        try:
            reward = first.keep(result, {})
            for row in further:
                row.keep(None, of_trajectory(first.progress.given))
        except InvalidField as error:
            return str(error)
        if reward is not None:
            if not is_finite(reward):
                return f"it returned {reward!r}, neither a finite number nor None"
            first.reward = float(reward)  # type: ignore[arg-type] # it is a number
        for row in (first, *further):
            if row.reward is not None and not is_finite(row.reward):
                return f"the reward of row {self.all.index(row)} is {row.reward!r}, no finite number"
        for row in (first, *further):
            row.settle()
        self._progress.keep_rows(self._sample, [row.progress for row in further])
        return ""
