"""Graceful end of a process: from `begin` on nothing new is waited for, and every wait in progress ends at once.

Only waits are interrupted, never a call to the store: what it granted would be lost to its caller.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from buffer_wire.errors import NotReady


class Drain:
    """State of the shutdown of this process, and the waits that end when it begins."""

    def __init__(self) -> None:
        self.begun = False
        self._waits: set[asyncio.Timeout] = set()

    def begin(self) -> None:
        """Refuse new waits and interrupt those in progress."""
        self.begun = True
        for wait in self._waits:
            wait.reschedule(asyncio.get_running_loop().time())

    def refuse(self) -> None:
        """Raise NotReady when the process is shutting down."""
        if self.begun:
            raise NotReady("this process of the service is shutting down; ask again")

    @asynccontextmanager
    async def interruptible(self) -> AsyncIterator[None]:
        """A wait that ends with NotReady as soon as the process shuts down."""
        self.refuse()
        wait = asyncio.timeout(None)
        try:
            async with wait:
                self._waits.add(wait)
                yield
        except TimeoutError:
            if wait.expired():
                self.refuse()
            raise
        finally:
            self._waits.discard(wait)
