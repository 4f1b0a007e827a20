"""Lane: a thread that runs calls in order, for calls that may block longer than their caller is ready to wait.

Invariant: a caller waits on a future, never on the thread. An abandoned lane ends by itself when its last call returns,
and never keeps the process from ending.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Lane:
    """Lane of calls on one thread; use it from one thread."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` after the calls before it."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 - the future carries it to whoever waits
                future.set_exception(error)
            else:
                future.set_result(result)

        self._calls.put(run)
        return future

    def end(self) -> None:
        """Take no more calls; the thread ends after those it has. Does not wait."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            # What a call refers to is let go before the next one, not when the next one comes.
            del call
