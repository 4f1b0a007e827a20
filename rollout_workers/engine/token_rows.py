"""Columns that an engine makes, while a sample grows: ragged by token, of one shape by token, or of positions.

Each adds up over engine calls with `+`. TokenRows and TokenValues have as many tokens as the response; PositionRows are
about inputs, and reach at most to the token before the last.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from buffer_wire import engine_columns

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """Rows of a column for t tokens, any number of int32 values to each."""

    values: npt.NDArray[np.int32]
    """Rows of all tokens, one token after another: int32 [sum of counts]."""
    counts: npt.NDArray[np.int32]
    """Number of rows of each token: int32 [t]."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> "TokenRows":
        """Rows from one list a token. Raises ValueError, TypeError, OverflowError for what is no list of integers."""
        counts = np.fromiter(map(len, rows), np.int32, len(rows))
        return cls(np.fromiter(chain.from_iterable(rows), np.int32, int(counts.sum())), counts)

    @classmethod
    def none_for(cls, tokens: int) -> "TokenRows":
        """Rows of `tokens` tokens that have none."""
        return cls(np.empty(0, np.int32), np.zeros(tokens, np.int32))

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.counts)

    def __add__(self, others: "TokenRows") -> "TokenRows":
        """Rows of these tokens, then of the others'."""
        return TokenRows(np.concatenate([self.values, others.values]), np.concatenate([self.counts, others.counts]))

    def first(self, tokens: int, *, prompt: int = 0) -> "TokenRows":  # noqa: ARG002 - the same for all kinds
        """Rows of the first `tokens` tokens."""
        counts = self.counts[:tokens]
        return TokenRows(self.values[: int(counts.sum())], counts)

    def and_none(self, tokens: int) -> "TokenRows":
        """Rows of these tokens, then none of an environment's."""
        return self + TokenRows.none_for(tokens)

    def holds(self, ids: npt.NDArray[np.int32]) -> bool:
        """True if token i's rows have ids[i] among them, for every i."""
        if not (self.counts > 0).all():
            return False
        found = self.values == np.repeat(ids, self.counts)
        starts = np.cumsum(self.counts) - self.counts
        return bool(np.logical_or.reduceat(found, starts).all()) if len(ids) else True


@dataclass(frozen=True, slots=True, eq=False)
class TokenValues:
    """Columns with one value, or one array, for each of t tokens."""

    arrays: Mapping[str, Array]
    """Values by the column's name, each [t, …]."""

    def __len__(self) -> int:
        """Number of tokens."""
        return len(next(iter(self.arrays.values())))

    def __add__(self, others: "TokenValues") -> "TokenValues":
        """Values of these tokens, then of the others'."""
        return TokenValues({name: np.concatenate([own, others.arrays[name]]) for name, own in self.arrays.items()})

    def first(self, tokens: int, *, prompt: int = 0) -> "TokenValues":  # noqa: ARG002 - the same for all kinds
        """Values of the first `tokens` tokens."""
        return TokenValues({name: array[:tokens] for name, array in self.arrays.items()})

    def and_none(self, tokens: int) -> "TokenValues":
        """Values of these tokens, then zeros of an environment's."""
        return self + TokenValues({n: np.zeros((tokens, *a.shape[1:]), a.dtype) for n, a in self.arrays.items()})


@dataclass(frozen=True, slots=True, eq=False)
class PositionRows:
    """Rows of the inputs from position `start` on, prompt and response; that of the last token comes with what follows.

    An engine that was cut off may give none: then the next call, which has all before it as its input, gives them.
    """

    start: int
    rows: Array
    """Rows [r, …] of positions start to start + r; of any shape without a row."""

    @property
    def end(self) -> int:
        """Position behind the last row."""
        return self.start + len(self.rows)

    def __add__(self, others: "PositionRows") -> "PositionRows":
        """These rows, then the others. Raises ValueError unless they begin where these end."""
        if not len(others.rows):
            return self
        if others.start != self.end:
            raise ValueError(f"rows from position {others.start} follow rows up to {self.end}")
        return PositionRows(self.start, np.concatenate([self.rows, others.rows]) if len(self.rows) else others.rows)

    def first(self, tokens: int, *, prompt: int = 0) -> "PositionRows":
        """Rows of the inputs of the first `tokens` tokens behind so many of the prompt."""
        return PositionRows(self.start, self.rows[: max(prompt + tokens - 1 - self.start, 0)])

    def and_none(self, tokens: int) -> "PositionRows":  # noqa: ARG002 - the same for all kinds
        """These rows: an environment's tokens are inputs of the next call, which gives theirs."""
        return self


EngineColumn: TypeAlias = TokenRows | TokenValues | PositionRows


def none_of(asked: str, *, start: int = 0) -> EngineColumn:
    """The column of that name in Task.columns, without a token; `start` is where those of positions begin."""
    if asked == engine_columns.ROUTED_EXPERTS:
        return PositionRows(start, np.empty((0, 0, 0), np.uint8))
    if asked == engine_columns.ENTROPY:
        return TokenValues({asked: np.empty(0, np.float32)})
    if top := engine_columns.top_of(asked):
        return TokenValues(
            {
                engine_columns.TOP_LOGPROBS: np.empty((0, top), np.float32),
                engine_columns.TOP_IDS: np.empty((0, top), np.int32),
            }
        )
    return TokenRows.none_for(0)


def joined(first: EngineColumn, second: EngineColumn) -> EngineColumn:
    """Both, one behind the other. Raises ValueError for positions that leave a gap."""
    return first + second  # type: ignore[operator] # of one name, and so of one kind
