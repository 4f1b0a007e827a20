"""TokenRows: a column whose rows belong to tokens, any number of them to each, while a sample grows.

Invariant: `values` holds the rows of token 0, then of token 1, and so on; `counts` says how many each has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt


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

    def first(self, tokens: int) -> "TokenRows":
        """Rows of the first `tokens` tokens."""
        counts = self.counts[:tokens]
        return TokenRows(self.values[: int(counts.sum())], counts)

    def holds(self, ids: npt.NDArray[np.int32]) -> bool:
        """True if token i's rows have ids[i] among them, for every i."""
        if not (self.counts > 0).all():
            return False
        found = self.values == np.repeat(ids, self.counts)
        starts = np.cumsum(self.counts) - self.counts
        return bool(np.logical_or.reduceat(found, starts).all()) if len(ids) else True
