"""Holds new requests back while their engine is paused.

SGLang would hold them itself, but out of reach: /abort_request does nothing to a request that waits there, and it
would keep the prefix cache key of the weights before the pause. Held here, a request can be given up at once and is
sent with what is true when it starts.

Invariant: after `close` returns, no request passes until `open`.
"""

import asyncio
from collections.abc import Collection, Iterable


class Gate:
    """Gate that new requests pass, open at first. For use within one event loop."""

    def __init__(self) -> None:
        self._open = True
        self._given_up: set[str] = set()
        self._waiting: set[str] = set()
        self._changed = asyncio.Condition()

    @property
    def is_open(self) -> bool:
        """True if requests pass."""
        return self._open

    @property
    def waiting(self) -> frozenset[str]:
        """Ids that are held back now."""
        return frozenset(self._waiting)

    def close(self) -> None:
        """Close the gate: hold back what comes from now on."""
        self._open = False

    async def open(self) -> None:
        """Open the gate and let everything pass."""
        self._open = True
        async with self._changed:
            self._changed.notify_all()

    async def give_up(self, rids: Iterable[str]) -> None:
        """Mark those of `rids` that wait here; a `pass_through` whose requests are all marked returns."""
        self._given_up.update(self._waiting.intersection(rids))
        async with self._changed:
            self._changed.notify_all()

    async def pass_through(self, rids: Collection[str]) -> set[str]:
        """Wait until the gate is open, or all of `rids` were given up; returns those that were."""
        if self._open:
            return set()
        wanted = set(rids)
        self._waiting |= wanted
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._open or wanted <= self._given_up)
            return wanted & self._given_up
        finally:
            self._waiting -= wanted
            self._given_up -= wanted
