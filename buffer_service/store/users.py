"""Users of the store for clients that move payloads themselves: one for a run, a direction and a span of time.

Invariants: a user may move payloads of its run in its direction, and nothing else. Its password is made out of the
run's secret. So every replica makes the same user, and makes it again where a server has lost it. Servers do not
replicate users: on a cluster each is made on every node, so that a replica that is promoted knows them. A user is good
in the period in which it was given out and in the next; then housekeeping deletes it, which cuts its connections. Users
whose run is gone are deleted too.
"""

import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import structlog

from buffer_service.commands.replies import text
from buffer_service.domain.ops import Direction, StoreUser
from buffer_service.domain.ports import UsersRefused
from buffer_service.store.payloads.every_node import EveryNode
from buffer_service.store.transport.index import Index
from buffer_wire.errors import StoreFault, StoreUnavailable
from buffer_wire.payloads.keys import key_prefix

log = structlog.get_logger(__name__)

PERIOD_MS = 900_000
"""Length of a period, in milliseconds of the store's clock. Access lasts for one to two of them."""

EXPIRE_S = 10.0
"""Shortest time, in seconds, between two looks for users whose time is over."""

_RIGHTS: Mapping[Direction, tuple[tuple[str, ...], str]] = {
    Direction.WRITE: (("+set",), "%W~"),
    Direction.READ: (("+get", "+mget"), "%R~"),
}
"""Commands, and what precedes the pattern of keys. `SET … GET` reads, which `%W` forbids."""


class PayloadUsers:
    """Users that the service makes where payloads lie. Names begin with `rb:DATABASE:`; it touches no others.

    `connection` leads to the index; `nodes` are those of a cluster that payloads lie on, None where there is none.
    """

    def __init__(self, connection: Index, nodes: EveryNode | None = None) -> None:
        self._connection = connection
        self._nodes = nodes
        self._database = connection.address.database
        self._expire_at = 0.0

    async def make(self, run_id: str, direction: Direction, secret: str, now_ms: int) -> StoreUser:
        """Make the user of the present period, or find it. `now_ms` is the store's clock.

        Raises UsersRefused, StoreUnavailable.
        """
        if not secret:
            raise UsersRefused("the run has no secret to make a password of")
        period = now_ms // PERIOD_MS
        name = f"rb:{self._database}:{run_id}:{direction.value}:{period}"
        password = hmac.new(secret.encode(), name.encode(), hashlib.sha256).hexdigest()
        commands, access = _RIGHTS[direction]
        select = ("+select",) if self._database and self._nodes is None else ()
        rights = ("resetchannels", "-@all", *commands, *select, f"{access}{key_prefix(run_id)}*")
        try:
            await self._ask("ACL", "SETUSER", name, "reset", "on", f">{password}", *rights)
        except StoreUnavailable:
            raise
        except StoreFault as refusal:
            raise UsersRefused(refusal.message) from refusal
        return StoreUser(name, password, (period + 2) * PERIOD_MS - now_ms)

    async def expire(self, runs: Callable[[], Awaitable[Iterable[str]]]) -> int:
        """Delete users whose time is over, or whose run is none of `runs()`; returns how many. Looks at most once in
        EXPIRE_S.

        Raises StoreUnavailable.
        """
        if time.monotonic() < self._expire_at:
            return 0
        self._expire_at = time.monotonic() + EXPIRE_S
        # In this order: a run or a period that begins meanwhile has no user among these.
        made = await self._made()
        living = set(await runs())
        seconds, _ = await self._connection.command("TIME")
        period = int(seconds) * 1_000 // PERIOD_MS
        return await self._delete(
            name for name, run_id, of in made if run_id not in living or not period - 1 <= of <= period
        )

    async def forget(self, run_id: str) -> None:
        """Delete the users of a run. Raises StoreUnavailable."""
        await self._delete(name for name, of, _ in await self._made() if of == run_id)

    async def _ask(self, *command: str) -> list[Any]:
        """Replies of all servers that keep users."""
        if self._nodes is None:
            return [await self._connection.command(*command)]
        return await self._nodes.ask(*command)

    async def _made(self) -> list[tuple[str, str, int]]:
        """Name, run and period of every user made here; none where the store tells the service of no users."""
        try:
            names = {text(name) for known in await self._ask("ACL", "USERS") for name in known}
        except StoreUnavailable:
            raise
        except StoreFault:
            # Then it has made none.
            return []
        made = []
        for name in names:
            match name.split(":"):
                case ["rb", database, run_id, direction, period] if (
                    database == str(self._database) and direction in list(Direction) and period.isdecimal()
                ):
                    made.append((name, run_id, int(period)))
        return made

    async def _delete(self, names: Iterable[str]) -> int:
        gone = list(names)
        if gone:
            await self._ask("ACL", "DELUSER", *gone)
            log.debug("users of the store deleted", users=gone)
        return len(gone)
