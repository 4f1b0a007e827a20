"""Hints that a run's state changed: one subscriber connection for all runs, tickets that count changes.

Invariants: a waiter that took a ticket before it checked the state misses no change that was published after. After a
reconnect every ticket rises, since hints may have been missed. A wait ends at its timeout whatever happens to the
connection. Waiters of a topic wake in the order in which they began to wait. What is kept is bounded, for nobody says
that a run is gone.
"""

import asyncio
import contextlib
import itertools
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Protocol

from buffer_service.domain.ports import Topic
from buffer_service.store.keys import NOTIFY_PATTERN, run_of_index_key
from buffer_wire.errors import StoreFault
from buffer_wire.resp.errors import ConnectionLost
from buffer_wire.resp.protocol import RespConnection

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.05, 2.0
PING_S = 10.0
"""A connection that has been silent this long is asked whether it lives; after as long again it counts as lost."""

MOST_TICKETS, MOST_LACKING = 16_384, 4_096
"""Topics that have tickets of their own, and runs whose pulls are known to lack groups: of 2,000 runs and more."""


class Source(Protocol):
    """A store that messages come from."""

    async def connect(self, on_push: Callable[[Any], None] | None = None) -> RespConnection:
        """A connection of its own. Raises StoreUnavailable, StoreUnsuitable."""
        ...


class StoreNotifications:
    """Implements domain.ports.Notifications; `listen` is the loop that its owner keeps alive."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._count = 0
        """Changes that were heard of; a topic's ticket is the count at its newest."""
        self._tickets: dict[tuple[str, str], int] = {}
        self._floor = 0
        """Ticket of the topics that have none of their own: no change of theirs that is forgotten came later."""
        self._lacking: dict[str, int] = {}
        """Queued groups that pulls of a run wait for, less those that have left for the store since they looked."""
        self._waiters: defaultdict[tuple[str, str], deque[asyncio.Future[None]]] = defaultdict(deque)
        self._heard = asyncio.Event()

    def ticket(self, run_id: str, topic: Topic) -> int:
        """See domain.ports.Notifications.ticket."""
        return self._tickets.get((run_id, topic.value), self._floor)

    async def wait(self, run_id: str, topic: Topic, seen: int, timeout_s: float) -> int:
        """See domain.ports.Notifications.wait."""
        waited = (run_id, topic.value)
        if self.ticket(run_id, topic) <= seen and timeout_s > 0:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters[waited].append(waiter)
            try:
                async with asyncio.timeout(timeout_s):
                    await waiter
            except TimeoutError:
                pass
            finally:
                self._forget(waited, waiter)
        return self.ticket(run_id, topic)

    def lacks(self, run_id: str, groups: int) -> None:
        """See domain.ports.Notifications.lacks."""
        if len(self._lacking) >= MOST_LACKING:
            del self._lacking[next(iter(self._lacking))]
        self._lacking[run_id] = groups

    def leaving(self, run_id: str, groups: int) -> None:
        """Note groups that are about to be sent to the store. The hint may come to nothing: they may not be queued."""
        lacking = self._lacking.get(run_id)
        if lacking is None:
            return
        if groups < lacking:
            self._lacking[run_id] = lacking - groups
        else:
            del self._lacking[run_id]
            self.raise_ticket(run_id, Topic.GROUPS.value)

    async def listen(self) -> None:
        """Listen until cancelled; connects again with back-off."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            with contextlib.suppress(StoreFault, ConnectionLost):
                connection = await self._source.connect(self._receive)
                try:
                    await connection.request([("PSUBSCRIBE", NOTIFY_PATTERN)])
                    self.raise_all()
                    backoff_s = FIRST_BACKOFF_S
                    await self._watch(connection)
                finally:
                    connection.abort("the subscriber ends")
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

    async def _watch(self, connection: RespConnection) -> None:
        """Return when the connection is lost or dead."""
        while connection.lost is None:
            self._heard.clear()
            try:
                async with asyncio.timeout(PING_S):
                    await self._heard.wait()
            except TimeoutError:
                try:
                    async with asyncio.timeout(PING_S):
                        await connection.request([("PING",)])
                except TimeoutError:
                    return

    def _receive(self, message: Any) -> None:  # noqa: ANN401 - whatever the store says
        self._heard.set()
        if isinstance(message, list) and message[0] == b"pmessage":
            _, _, channel, topics = message
            run_id = run_of_index_key(channel.decode())
            for topic in topics.decode().split(","):
                self.raise_ticket(run_id, topic)

    def raise_ticket(self, run_id: str, topic: str) -> None:
        """Raise the ticket of a topic that changed, and wake its waiters."""
        self._count += 1
        self._tickets[run_id, topic] = self._count
        if len(self._tickets) > MOST_TICKETS:
            self._forget_half()
        self._wake((run_id, topic))

    def raise_all(self) -> None:
        """Raise all tickets, since anything may have changed, and wake all waiters."""
        self._count += 1
        self._floor = self._count
        self._tickets.clear()
        for waited in list(self._waiters):
            self._wake(waited)

    def _forget_half(self) -> None:
        """Forget the tickets that have been there for longest. Their topics count as changed now: a look too many."""
        for ticket in list(itertools.islice(self._tickets, MOST_TICKETS // 2)):
            del self._tickets[ticket]
        self._floor = self._count

    def _wake(self, waited: tuple[str, str]) -> None:
        for waiter in self._waiters.pop(waited, ()):
            if not waiter.done():
                waiter.set_result(None)

    def _forget(self, waited: tuple[str, str], waiter: asyncio.Future[None]) -> None:
        waiters = self._waiters.get(waited)
        if waiters is not None:
            with contextlib.suppress(ValueError):
                waiters.remove(waiter)
            if not waiters:
                del self._waiters[waited]
