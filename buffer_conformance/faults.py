"""Faults of the proxy: lose a reply, break a call before its request goes on, hold requests back.

Each fault is armed for some methods, and strikes once.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from buffer_conformance.record import Entry, Exchange

When = Callable[[Any], bool]


class Broken(Exception):
    """The call ends here with UNAVAILABLE, as far as the candidate is told; the message says what was done."""


@dataclass(slots=True)
class Fault:
    """An armed fault; `fired` is set once it has struck."""

    methods: frozenset[str]
    what: str
    when: When
    armed: bool = True
    fired: asyncio.Event = field(default_factory=asyncio.Event)

    def strikes(self, exchange: Exchange, entry: Entry) -> bool:
        """True when it is this message's turn, and then never again."""
        if not self.armed or exchange.method not in self.methods or entry.message is None:
            return False
        if not self.when(entry.message):
            return False
        self.armed = False
        exchange.fault = self.what
        self.fired.set()
        return True

    def disarm(self) -> None:
        """Disarm the fault: it strikes no more."""
        self.armed = False


def always(_: object) -> bool:
    """Condition of a fault that strikes whatever the message says."""
    return True


class Faults:
    """The armed faults of the proxy."""

    def __init__(self) -> None:
        self._replies: list[Fault] = []
        self._requests: list[Fault] = []
        self._held: frozenset[str] = frozenset()
        self._released = asyncio.Event()
        self._released.set()

    def lose_reply(self, *methods: str, when: When = always) -> Fault:
        """The service does what it is asked, and the candidate hears nothing of it."""
        fault = Fault(frozenset(methods), "the reply was lost", when)
        self._replies.append(fault)
        return fault

    def break_call(self, *methods: str) -> Fault:
        """The request does not reach the service, and its call ends."""
        fault = Fault(frozenset(methods), "the call was broken before its request reached the service", always)
        self._requests.append(fault)
        return fault

    def hold(self, *methods: str) -> None:
        """Keep the requests of these methods back until `release`."""
        self._held = frozenset(methods)
        self._released.clear()

    def release(self) -> None:
        """Let the requests that are held back go on."""
        self._held = frozenset()
        self._released.set()

    async def request(self, exchange: Exchange, entry: Entry) -> None:
        """A request is about to be passed on. Raises Broken."""
        if exchange.method in self._held:
            await self._released.wait()
        _strike(self._requests, exchange, entry)

    def reply(self, exchange: Exchange, entry: Entry) -> None:
        """A reply is about to be passed on. Raises Broken."""
        _strike(self._replies, exchange, entry)


def _strike(faults: Sequence[Fault], exchange: Exchange, entry: Entry) -> None:
    for fault in faults:
        if fault.strikes(exchange, entry):
            raise Broken(fault.what)
