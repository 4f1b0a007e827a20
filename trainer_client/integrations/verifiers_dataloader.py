"""A data loader that can be looked ahead of, so that future batches can be submitted while this one is trained.

Contract followed: verifiers' AsyncDataLoaderWrapper 0.1.2 to 0.1.6, with two differences: a pass ends with the loader's
epoch, and batches of the next epoch that were looked at already are part of the next pass (there they are lost); and
one cannot look further ahead than `buffer_size` (there such a look loses batches).
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Self

from buffer_wire.errors import InvalidField


class AsyncDataLoaderWrapper:
    """Wraps `dataloader`, any iterable that can be iterated again and again; threads may share it.

    Invariant: `_buffer` holds what comes next, in order; its first `_of_this_epoch` batches belong to the present pass.
    """

    def __init__(self, dataloader: Iterable[Any], buffer_size: int = 5) -> None:
        if buffer_size < 1:
            raise InvalidField("buffer_size", buffer_size, "at least 1")
        self.dataloader = dataloader
        self.buffer_size = buffer_size
        self._buffer: deque[Any] = deque()
        self._of_this_epoch = 0
        self._iterator: Iterator[Any] | None = None
        """Where the batches behind the buffer come from: of this epoch or, once that has ended, of the next."""
        self._epoch_ended = False
        """Everything of this epoch is in the buffer or consumed."""
        self._exhausted = False
        """The next epoch, too, is in the buffer as a whole."""
        self._current_batch: Any = None
        self._lock = threading.Lock()

    def __iter__(self) -> Self:
        """Begin a pass: with the batches of the next epoch if this one is over, else with a new iterator."""
        with self._lock:
            if self._epoch_ended and self._of_this_epoch == 0:
                self._of_this_epoch = len(self._buffer)
                self._epoch_ended = self._exhausted
            else:
                self._buffer.clear()
                self._of_this_epoch = 0
                self._iterator = None
                self._epoch_ended = False
            self._exhausted = False
            self._current_batch = None
        return self

    def __next__(self) -> Any:  # noqa: ANN401 - whatever the loader gives
        """The next batch; StopIteration at the end of the epoch."""
        with self._lock:
            while not self._of_this_epoch and not self._epoch_ended:
                self._read()
            if not self._of_this_epoch:
                raise StopIteration
            self._of_this_epoch -= 1
            self._current_batch = self._buffer.popleft()
            return self._current_batch

    def peek_ahead(self, n: int = 1) -> list[Any]:
        """The next `n` batches, into the next epoch if need be, fewer if there are no more; n = 0: the current one.

        At most `buffer_size` of them: InvalidField.
        """
        with self._lock:
            if n == 0:
                return [] if self._current_batch is None else [self._current_batch]
            return self._ahead(n, "n")[:n]

    def get_future_batches(self, start_offset: int, count: int) -> list[Any]:
        """`count` batches from `start_offset` positions ahead (0: the next one), fewer if there are no more.

        Raises InvalidField beyond `buffer_size`.
        """
        with self._lock:
            return self._ahead(start_offset + count, "start_offset + count")[start_offset : start_offset + count]

    def __len__(self) -> int:
        """Of the loader."""
        return len(self.dataloader)  # type: ignore[arg-type]

    @property
    def batch_size(self) -> Any:  # noqa: ANN401 - the loader's own
        """Of the loader."""
        return self.dataloader.batch_size  # type: ignore[attr-defined]

    @property
    def dataset(self) -> Any:  # noqa: ANN401 - the loader's own
        """Of the loader."""
        return self.dataloader.dataset  # type: ignore[attr-defined]

    def _ahead(self, n: int, name: str) -> list[Any]:
        if not 0 <= n <= self.buffer_size:
            raise InvalidField(name, n, f"0 to buffer_size, {self.buffer_size}")
        while len(self._buffer) < n and not self._exhausted:
            self._read()
        return list(self._buffer)

    def _read(self) -> None:
        """Put one more batch into the buffer, or find that an epoch has ended."""
        if self._iterator is None:
            self._iterator = iter(self.dataloader)
        try:
            self._buffer.append(next(self._iterator))
        except StopIteration:
            self._exhausted = self._epoch_ended
            self._epoch_ended = True
            self._iterator = None
            return
        if not self._epoch_ended:
            self._of_this_epoch += 1
