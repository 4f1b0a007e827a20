"""Waits for the state of a run to change: first come, first served, and only the head of a line asks the store.

Notifications are hints. Whoever is at the head takes a ticket, tries, waits for a newer ticket or at most 2 s, and
tries again. So a lost hint costs time, never an answer. The 2 s are jittered, so that replicas do not fall into step.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf
from typing import TypeVar

from buffer_service.domain.ports import Notifications, Topic
from buffer_service.rpc.flow.drain import Drain

T = TypeVar("T")


RECHECK_S = 2.0


@dataclass(slots=True)
class _WaitingLine:
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock of the line, whose waiters are served in the order in which they came."""
    people: int = 0


class WaitingLines:
    """The lines of one replica, one for each (run, topic)."""

    def __init__(self, notifications: Notifications, drain: Drain) -> None:
        self._notifications = notifications
        self._drain = drain
        self._lines: dict[tuple[str, Topic], _WaitingLine] = {}

    @asynccontextmanager
    async def turn(self, run_id: str, topic: Topic, deadline: float | None = None) -> AsyncIterator[bool]:
        """Wait for the head of the line; False when `deadline` (loop time) passes first. Raises NotReady on drain."""
        line = self._lines.setdefault((run_id, topic), _WaitingLine())
        line.people += 1
        try:
            at_head = await self._enter(line, deadline)
            try:
                yield at_head
            finally:
                if at_head:
                    line.turn.release()
        finally:
            line.people -= 1
            if not line.people:
                del self._lines[run_id, topic]

    async def _enter(self, line: _WaitingLine, deadline: float | None) -> bool:
        async with self._drain.interruptible():
            try:
                async with asyncio.timeout_at(deadline):
                    return await line.turn.acquire()
            except TimeoutError:
                # A drain interrupts from outside this block and is not caught here.
                return False

    async def hint(
        self,
        run_id: str,
        topic: Topic,
        ticket: int,
        deadline: float | None = None,
        longest_s: float = RECHECK_S,
        *,
        due_s: float = inf,
    ) -> None:
        """Wait for a ticket above `ticket`, at most `longest_s` and not past the deadline. Raises NotReady on drain.

        `due_s`: seconds until something is due that no ticket tells.
        """
        left = min(longest_s * random.uniform(0.5, 1.0), due_s)  # noqa: S311 - jitter, not a secret
        if deadline is not None:
            left = min(left, max(0.0, deadline - asyncio.get_running_loop().time()))
        async with self._drain.interruptible():
            await self._notifications.wait(run_id, topic, ticket, left)

    def ticket(self, run_id: str, topic: Topic) -> int:
        """The present ticket; take it before looking at the state."""
        return self._notifications.ticket(run_id, topic)

    def lacks(self, run_id: str, groups: int) -> None:
        """See domain.ports.Notifications.lacks."""
        self._notifications.lacks(run_id, groups)

    async def until(
        self,
        run_id: str,
        topic: Topic,
        attempt: Callable[[], Awaitable[T]],
        done: Callable[[T], bool],
        wait_s: float,
        due_s: Callable[[T], float] = lambda _result: inf,
    ) -> T:
        """The first result of `attempt` that is `done`, or the last one when `wait_s` has passed.

        `due_s`: seconds after which another try may bring more though no ticket tells, by what the last one brought.

        The first try is made at once, whoever waits: it may release what the others wait for.
        """
        ticket = self.ticket(run_id, topic)
        result = await attempt()
        if wait_s <= 0 or done(result):
            return result
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        # Where others wait, their tries may have told the store to give its hint for something else.
        alone = (run_id, topic) not in self._lines
        async with self.turn(run_id, topic, deadline) as at_head:
            if alone:
                await self.hint(run_id, topic, ticket, deadline, due_s=due_s(result))
            while True:
                ticket = self.ticket(run_id, topic)
                result = await attempt()
                if not at_head or done(result) or loop.time() >= deadline:
                    return result
                await self.hint(run_id, topic, ticket, deadline, due_s=due_s(result))
