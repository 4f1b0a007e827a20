"""Waiting for a condition over state that several tasks of one loop change.

Levels, not edges: whoever changes the state calls `notify`, waiters look again. Nothing is missed between look and wait
because neither yields to the loop.
"""

import asyncio
from collections.abc import Callable


class Changes:
    """Wakes all waiters at every change."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Wake the waiters: the state has changed."""
        self._next.set()
        self._next = asyncio.Event()

    async def until(self, holds: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until `holds()`; False when `timeout_s` passed first."""
        if holds():
            return True
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    await self._next.wait()
        except TimeoutError:
            return False
        return True


async def until_any(holds: Callable[[], bool], *sources: Changes, timeout_s: float) -> bool:
    """Wait until `holds()`, looked at after a change of any source; False when `timeout_s` passed first."""
    if holds():
        return True
    waits = [asyncio.create_task(source.until(holds, timeout_s)) for source in sources]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    return holds()
