"""Decoding slots of the simulated engine: first come, first served; whoever waits can be sent away.

Invariants: never more than `count` holders; a slot that is freed goes to the longest waiting.
"""

import asyncio
from collections import OrderedDict


class Slots:
    """Slots of an engine, given out in the order of the requests. For use within one event loop."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: OrderedDict[str, asyncio.Future[bool]] = OrderedDict()

    @property
    def waiting(self) -> tuple[str, ...]:
        """Ids of the requests that wait for a slot, longest first."""
        return tuple(self._waiting)

    async def acquire(self, rid: str) -> bool:
        """Wait for a slot. False, without one, if `send_away` came first."""
        if self._free and not self._waiting:
            self._free -= 1
            return True
        turn = self._waiting[rid] = asyncio.get_running_loop().create_future()
        try:
            granted: bool = await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self.release()
            raise
        finally:
            self._waiting.pop(rid, None)
        return granted

    def release(self) -> None:
        """Give a slot back."""
        while self._waiting:
            _, turn = self._waiting.popitem(last=False)
            if not turn.done():
                turn.set_result(True)
                return
        self._free += 1

    def send_away(self, rid: str) -> None:
        """End the wait of `rid`, if it waits."""
        turn = self._waiting.pop(rid, None)
        if turn is not None and not turn.done():
            turn.set_result(False)
