"""Replication for policy.wait_replicas: acknowledgements wait until replicas of the store have what they acknowledge.

Invariants: a wait begins after the write it is for was answered, at the same life of the same server. It covers all
that this server has written so far, so that repeats that write nothing wait for the original's write. Waits that begin
together share one WAIT, so a slow replica holds up nobody's commands, and nobody's wait longer than two timeouts. A run
without wait_replicas costs nothing but a look at its policy every POLICY_AGE_S.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from buffer_service.commands.replies import unpack
from buffer_service.store.keys import index_key
from buffer_service.store.transport.shared_calls import SharedCalls
from buffer_wire.errors import NotReplicated, StoreUnavailable
from buffer_wire.resp.encoding import Parts
from buffer_wire.resp.errors import ReplyError

POLICY_AGE_S = 1.0
"""Longest time, in seconds, for which other processes of the service may not notice a changed wait_replicas."""

CHANNEL = "rb:replicated"
"""Channel to which nobody listens. WAIT waits for its connection's last write, and a message leaves no data. In a
cluster messages take another way than writes."""

Send: TypeAlias = Callable[[Sequence[Parts], float], Awaitable[tuple[list[Any], str]]]
"""Sends commands with so many seconds more than usual; their replies, and the server that answered."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Replicas and time-out that a run's policy asks for."""

    replicas: int
    timeout_ms: int


NOTHING = Wanted(0, 0)


def no_data() -> Parts:
    """A write that leaves no data, on a server that is in no cluster."""
    return "PUBLISH", CHANNEL, ""


class Waits:
    """Waits for the replicas of one server. `connect` makes a way to it for each kind of wait, `write` a command that
    its replicas get.
    """

    def __init__(self, store: str, connect: Callable[[], Send], write: Callable[[], Parts] = no_data) -> None:
        self._store = store
        self._connect = connect
        self._write = write
        self._shared: dict[Wanted, SharedCalls[tuple[int | ReplyError, str]]] = {}

    async def wait(self, wanted: Wanted, server: str) -> None:
        """Wait until the replicas have all that `server` has written. Raises NotReplicated, StoreUnavailable."""
        shared = self._shared.get(wanted)
        if shared is None:
            shared = self._shared[wanted] = SharedCalls(partial(_send, wanted, self._connect(), self._write))
        reached, waited_at = await shared.answer()
        if isinstance(reached, ReplyError):
            raise StoreUnavailable(self._store, str(reached)) from reached
        if waited_at != server:
            raise StoreUnavailable(self._store, "the primary has changed between a write and the wait for its replicas")
        if reached < wanted.replicas:
            raise NotReplicated(wanted.replicas, reached, wanted.timeout_ms)


class Replication:
    """Waits that the policies of one process's runs ask for. `ask` sends one command, and raises error replies."""

    def __init__(self, ask: Callable[..., Awaitable[Any]]) -> None:
        self._ask = ask
        self._policies: dict[str, tuple[float, Wanted]] = {}

    async def wanted(self, run_id: str) -> Wanted:
        """Replicas that an acknowledgement of this run waits for, read from the store every POLICY_AGE_S."""
        known = self._policies.get(run_id)
        if known is not None and known[0] > time.monotonic():
            return known[1]
        # The age counts from before the question.
        until = time.monotonic() + POLICY_AGE_S
        packed = await self._ask("HGET", index_key(run_id, "run"), "policy")
        if not isinstance(packed, bytes):
            self._policies.pop(run_id, None)
            return NOTHING
        policy = unpack(packed)
        wanted = Wanted(policy.get(b"wait_replicas", 0), policy.get(b"wait_timeout_ms", 0))
        self._policies[run_id] = (until, wanted)
        return wanted

    def forget(self, run_id: str) -> None:
        """Forget what is known of the run's policy: it has changed."""
        self._policies.pop(run_id, None)


async def _send(wanted: Wanted, send: Send, write: Callable[[], Parts]) -> tuple[int | ReplyError, str]:
    """Number of replicas that have what was written until now, and the server that was asked."""
    commands: list[Parts] = [write(), ("WAIT", wanted.replicas, wanted.timeout_ms)]
    (written, reached), server = await send(commands, wanted.timeout_ms / 1000)
    # Without a write of its own a connection waits for nothing.
    return written if isinstance(written, ReplyError) else reached, server
