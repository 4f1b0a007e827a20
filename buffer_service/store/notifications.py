"""Hints that a run's state changed: one subscriber connection for all runs, tickets that count changes.

Invariants: whoever took a ticket before it checked the state misses no change that was published after; after a
reconnect every ticket rises, since hints may have been missed; a wait ends at its timeout whatever happens to the
connection. Waiters of a topic wake in the order in which they began to wait.
"""

import asyncio
import contextlib
from collections import defaultdict, deque
from typing import Any

from redis import exceptions as redis_errors

from buffer_service.domain.ports import Topic
from buffer_service.store.connection import StoreConnection
from buffer_service.store.keys import NOTIFY_PATTERN, run_of_index_key

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.05, 2.0
POLL_S = 5.0


class StoreNotifications:
    """Implements domain.ports.Notifications; `run` is the loop that its owner keeps alive."""

    def __init__(self, connection: StoreConnection) -> None:
        self._connection = connection
        self._tickets: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._missed = 0
        self._waiters: defaultdict[tuple[str, str], deque[asyncio.Future[None]]] = defaultdict(deque)

    def ticket(self, run_id: str, topic: Topic) -> int:
        """See domain.ports.Notifications.ticket."""
        return self._missed + self._tickets.get((run_id, topic.value), 0)

    async def wait(self, run_id: str, topic: Topic, seen: int, timeout_s: float) -> int:
        """See domain.ports.Notifications.wait."""
        waited = (run_id, topic.value)
        if self.ticket(run_id, topic) <= seen and timeout_s > 0:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters[waited].append(waiter)
            try:
                await asyncio.wait_for(waiter, timeout_s)
            except TimeoutError:
                pass
            finally:
                self._forget(waited, waiter)
        return self.ticket(run_id, topic)

    async def run(self) -> None:
        """Listen until cancelled; connects again with back-off."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            pubsub = self._connection.pubsub()
            try:
                await pubsub.psubscribe(NOTIFY_PATTERN)
                while True:
                    message = await pubsub.get_message(timeout=POLL_S)
                    if message is not None:
                        backoff_s = FIRST_BACKOFF_S
                        self._receive(message)
            except (redis_errors.RedisError, OSError):
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
            finally:
                with contextlib.suppress(redis_errors.RedisError, OSError):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]

    def _receive(self, message: dict[str, Any]) -> None:
        if message["type"] == "psubscribe":
            self.raise_all()
        elif message["type"] == "pmessage":
            run_id = run_of_index_key(message["channel"].decode())
            for topic in message["data"].decode().split(","):
                self.raise_ticket(run_id, topic)

    def raise_ticket(self, run_id: str, topic: str) -> None:
        """Something of that topic changed."""
        self._tickets[run_id, topic] += 1
        self._wake((run_id, topic))

    def raise_all(self) -> None:
        """Anything may have changed."""
        self._missed += 1
        for waited in list(self._waiters):
            self._wake(waited)

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
