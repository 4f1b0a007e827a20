"""Threads for plain functions of users (rewards, agents), which may hang for ever.

Invariants: at most `count` threads, each kept for the next call, with whatever the function keeps in thread-locals; one
that hangs keeps its place and holds up nothing else, the end of the process included. Executors of the standard library
are waited for when the interpreter ends.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable


class RewardThreads:
    """Threads for calls of users' functions, started when they are first needed."""

    def __init__(self, count: int, name: str = "reward") -> None:
        self._count = count
        self._name = name
        self._started = 0
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)

    async def run(self, call: Callable[[], None]) -> None:
        """Make the call in a thread, as soon as one is free; returns when it is made. Raises what it raises."""
        loop = asyncio.get_running_loop()
        made: asyncio.Future[None] = loop.create_future()

        def tell(error: Exception | None) -> None:
            if made.done():
                return  # Nobody waits for it any more.
            if error is None:
                made.set_result(None)
            else:
                made.set_exception(error)

        def make() -> None:
            error: Exception | None = None
            try:
                call()
            except Exception as raised:  # noqa: BLE001 - raised where it is waited for
                error = raised
            with contextlib.suppress(RuntimeError):  # The loop is closed: it came too late.
                loop.call_soon_threadsafe(tell, error)

        self._calls.put(make)
        self._have_a_thread()
        await made

    def close(self) -> None:
        """End the threads, each after the call that it is in; calls that wait are not made."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._calls.get_nowait()
        for _ in range(self._started):
            self._calls.put(None)

    def _have_a_thread(self) -> None:
        if self._idle.acquire(blocking=False) or self._started == self._count:
            return
        threading.Thread(target=self._work, name=f"{self._name}_{self._started}", daemon=True).start()
        self._started += 1

    def _work(self) -> None:
        while (make := self._calls.get()) is not None:
            make()
            self._idle.release()
