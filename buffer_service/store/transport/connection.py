"""The transport: how scripts and payloads get to the store and back.

Knows nothing of the rules. Invariants: a script is never sent twice unless its first try certainly did not run;
payloads and the script that indexes them go out in one transaction, so near maxmemory either both happen or neither;
nothing is done to a run on a server before that server has been told what this process has acknowledged of it; what
policy.wait_replicas asks for is there before an answer is, and where there is an append-only file the operating system
has it; every wait has a deadline and ends in StoreUnavailable, StoreOutOfMemory, StoreOutOfDisk, StoreUnsuitable,
LayoutChanged or NotReplicated.
"""

import asyncio
import dataclasses
import re
import time
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from buffer_service.domain.ops import Buffer, payload_size
from buffer_service.store.address import Address
from buffer_service.store.keys import SCHEMA_VERSION, index_key, new_secret
from buffer_service.store.primary import Primary
from buffer_service.store.replies import head_of, pack, parse
from buffer_service.store.scripts import Script, load_scripts
from buffer_service.store.transport.replication import Exchange, Replication
from buffer_service.store.transport.resp import Command, ConnectionLost, Part, ReplyError, RespConnection
from buffer_service.store.transport.shared_rounds import SharedRounds
from buffer_wire.errors import (
    LayoutChanged,
    RolloutBufferError,
    StoreFault,
    StoreOutOfDisk,
    StoreOutOfMemory,
    StoreRolledBack,
    StoreUnavailable,
    StoreUnsuitable,
    UnknownRun,
)

T = TypeVar("T")

REPLY_BYTES = 4 << 20
"""Most bytes of payloads asked for in one command."""

LOADING_TIMEOUT_S = 10.0
LOADING_PAUSE_S = 0.05

_LOOKS = frozenset({"inspect_groups", "inspect_steps", "inspect_task", "inspect_tasks", "inspect_waits", "view"})

UNACKNOWLEDGED = _LOOKS | {"abandon", "delete_run", "free", "sweep"}
"""Scripts whose replies promise nothing: they wait for no replicas, and no revision is remembered of them."""

_CHANGES_POLICY = frozenset({"create_run", "update_policy"})

_ELSEWHERE = frozenset({"READONLY", "MASTERDOWN"})
"""Codes of a server that has become a replica."""

_UNAVAILABLE = frozenset({"LOADING", "BUSY", "NOREPLICAS", "UNBLOCKED"}) | _ELSEWHERE
"""Codes of a server that may do the same later."""

_LAYOUT = re.compile(r"rb-layout (\w+)")
"""What scripts say of a run in another layout (lua/lib/run.lua)."""


class CallMeter(Protocol):
    """Is told of every call, by the name of its script, or `fetch` (payloads) or `command` (any single command)."""

    def took(self, operation: str, seconds: float) -> None:
        """A call ended after so long, in whatever way."""
        ...

    def failed(self, kind: str) -> None:
        """A call failed with an error of that reason."""
        ...


class _NoMeter:
    def took(self, operation: str, seconds: float) -> None:
        """Not measured."""

    def failed(self, kind: str) -> None:
        """Not counted."""


def portions(payload_keys: Sequence[str]) -> list[Sequence[str]]:
    """The keys split so that each portion's payloads stay below REPLY_BYTES (or are one payload)."""
    split: list[Sequence[str]] = []
    first, size = 0, 0
    for index, key in enumerate(payload_keys):
        size += payload_size(key)
        if size > REPLY_BYTES and index > first:
            split.append(payload_keys[first:index])
            first, size = index, payload_size(key)
    if first < len(payload_keys):
        split.append(payload_keys[first:])
    return split


class _Link:
    """A connection that is made when it is needed and made again after it was lost."""

    def __init__(self, primary: Primary) -> None:
        self._primary = primary
        self._connection: RespConnection | None = None
        self._connecting = asyncio.Lock()
        self._failure: StoreUnavailable | None = None
        self._failed_at = 0.0

    async def get(self) -> RespConnection:
        """The living connection. Raises StoreUnavailable, StoreUnsuitable."""
        connection = self._connection
        if connection is None or connection.is_over:
            came = time.monotonic()
            async with self._connecting:
                connection = self._connection
                if connection is None or connection.is_over:
                    if self._failure is not None and self._failed_at >= came:
                        # It was tried while this caller waited for its turn.
                        raise self._failure
                    connection = self._connection = await self._connect()
        return connection

    async def _connect(self) -> RespConnection:
        try:
            return await self._primary.connect()
        except StoreUnavailable as error:
            self._failure, self._failed_at = error, time.monotonic()
            raise


class StoreConnection:
    """Connections to one store: one for scripts and commands, and two for payloads, which would hold the others up."""

    def __init__(
        self,
        url: str,
        *,
        ca: Path | None = None,
        embedded: bool = False,
        timeout_s: float = 30.0,
        meter: CallMeter | None = None,
    ) -> None:
        self.address = dataclasses.replace(Address.parse(url), ca=ca)
        self.name = self.address.shown
        self.primary = Primary(self.address)
        self._embedded = embedded
        self._timeout_s = timeout_s
        self._meter = meter or _NoMeter()
        self._control = _Link(self.primary)
        self._writes = _Link(self.primary)
        self._reads = _Link(self.primary)
        self._replication = Replication(self.name, self._over(self._control), lambda: self._over(_Link(self.primary)))
        self._appended = SharedRounds(self._ask_whether_appended)
        self._claimed: defaultdict[str, set[str]] = defaultdict(set)
        """Runs by the primary's tenure in which it was told what was acknowledged of them."""
        self._acknowledged: dict[str, int] = {}
        """Highest revision by run."""

    async def open(self) -> None:
        """Load the scripts. Raises StoreUnavailable."""
        await self._load_scripts()

    async def close(self) -> None:
        """Close all connections."""
        await self.primary.close()

    async def run(self, script: Script, run_id: str, arguments: bytes, *, acknowledges: bool = True) -> Buffer:
        """Run a script on a run's keys; its packed reply, which waits for replicas unless it acknowledges nothing.

        Raises StoreRolledBack beside what the transport raises.
        """
        call = ("EVALSHA", script.sha, 1, index_key(run_id, "run"), arguments)
        decision = self._decide(self._control, [call], script, run_id, acknowledges=acknowledges)
        return await self._measured(script.name, decision)

    async def store_and_run(
        self, payloads: Sequence[tuple[str, Buffer]], script: Script, run_id: str, arguments: bytes
    ) -> Buffer:
        """Stage and store payloads and run the script that indexes them, all in one transaction."""
        staged: list[Part] = []
        stored: list[Part] = []
        for key, body in payloads:
            staged += (0, key)
            stored += (key, body)
        commands: list[Command] = [
            ("MULTI",),
            ("ZADD", index_key(run_id, "staging"), *staged),
            ("MSET", *stored),
            ("EVALSHA", script.sha, 1, index_key(run_id, "run"), arguments),
            ("EXEC",),
        ]
        return await self._measured(script.name, self._decide(self._writes, commands, script, run_id))

    async def _decide(
        self, link: _Link, commands: Sequence[Command], script: Script, run_id: str, *, acknowledges: bool = True
    ) -> Buffer:
        """The script's reply; `commands` call it alone, or at the end of a transaction."""
        acknowledges = acknowledges and script.name not in UNACKNOWLEDGED
        replies, at = await self._exchange(link, commands, script, run_id, acknowledges=acknowledges)
        reply = self._script_reply(replies)
        if isinstance(reply, ReplyError):
            if reply.code != "NOSCRIPT":
                raise self._fault(reply)
            # A transaction again as a whole: the server may be another one by now, without the payloads.
            await self._load_scripts()
            replies, at = await self._exchange(link, commands, script, run_id, acknowledges=acknowledges)
            reply = self._checked(self._script_reply(replies))
        return await self._kept(script, run_id, at, reply) if acknowledges else reply

    def _script_reply(self, replies: Sequence[Any]) -> Any:  # noqa: ANN401
        *queued, reply = replies
        if queued:
            for refusal in queued:
                self._checked(refusal)
            reply = self._checked(reply)[-1]
        return reply

    async def fetch(self, payload_keys: Sequence[str]) -> list[Buffer | None]:
        """Payloads in order, None where one is gone; at most REPLY_BYTES are asked for at once."""
        bodies: list[Buffer | None] = []
        for portion in portions(payload_keys):
            bodies += await self._measured("fetch", self._single(self._reads, ("MGET", *portion)))
        return bodies

    async def fetch_part(self, payload_key: str, first: int, size: int) -> Buffer:
        """Bytes [first, first + size) of a payload, as far as it goes; empty when it is gone."""
        part: Buffer = await self._measured(
            "fetch", self._single(self._reads, ("GETRANGE", payload_key, first, first + size - 1))
        )
        return part

    async def command(self, *parts: Part) -> Any:  # noqa: ANN401 - replies are of any type
        """Send one command."""
        return await self._measured("command", self._single(self._control, parts))

    async def _single(self, link: _Link, command: Command) -> Any:  # noqa: ANN401
        (reply,), _ = await self._exchange(link, [command])
        return self._checked(reply)

    async def _measured(self, operation: str, call: Coroutine[Any, Any, T]) -> T:
        started = time.perf_counter()
        try:
            return await call
        except RolloutBufferError as error:
            self._meter.failed(error.reason)
            raise
        finally:
            self._meter.took(operation, time.perf_counter() - started)

    async def _load_scripts(self) -> None:
        commands = [("SCRIPT", "LOAD", script.source) for script in load_scripts().values()]
        replies, _ = await self._exchange(self._control, commands)
        for reply in replies:
            self._checked(reply)

    async def _kept(self, script: Script, run_id: str, at: RespConnection, reply: Buffer) -> Buffer:
        """The reply, once what it acknowledges is where it must be; remembers its revision."""
        tag, then = head_of(reply)
        if tag == b"error":
            if then == b"unknown_run":
                self._acknowledged.pop(run_id, None)
            return reply
        if script.name in _CHANGES_POLICY:
            self._replication.forget(run_id)
        if tag == b"created":
            # A run of that name may have been deleted before.
            self._acknowledged.pop(run_id, None)
        wanted = self._replication.known(run_id) or await self._replication.asked(run_id)
        if wanted.replicas:
            await self._replication.wait(wanted, at.server)
        if at.appends and await self._appended.answer() != at.server:
            raise StoreUnavailable(self.name, "it was started anew between a write and the look whether it is appended")
        if isinstance(then, int):
            self._acknowledged[run_id] = max(then, self._acknowledged.get(run_id, 0))
        return reply

    async def _ask_whether_appended(self) -> str:
        """The server that has handed all it has answered so far to the operating system. Raises StoreOutOfDisk.

        A server that may go on without its disk (all but `appendfsync always`) answers the writes whose append has just
        failed, and refuses whatever comes after it until it has made up for it: writes, and this.
        """
        (reply,), at = await self._exchange(self._control, [("PING",)])
        self._checked(reply)
        return at.server

    async def _claim(self, connection: RespConnection, run_id: str) -> ReplyError | None:
        """Tell a server what this process has acknowledged of a run; an answer by which it must be told again.

        Raises StoreRolledBack when the server has less; the run is then paused.
        """
        claim = load_scripts()["claim"]
        arguments = pack(connection.tenure, self._acknowledged.get(run_id, 0), new_secret())
        call = ("EVAL", claim.source, 1, index_key(run_id, "run"), arguments)
        replies = await connection.request([call])
        refusal = _unrun(replies)
        if refusal is None:
            try:
                parse(run_id, self._checked(replies[0]))
            except UnknownRun:
                # The script that comes next says so, or creates it.
                return None
            except StoreRolledBack:
                self._acknowledged.pop(run_id, None)
                self._claimed[connection.tenure].add(run_id)
                raise
            self._claimed[connection.tenure].add(run_id)
        return refusal

    async def _claimed_first(
        self,
        connection: RespConnection,
        commands: Sequence[Command],
        script: Script,
        run_id: str,
        *,
        acknowledges: bool,
    ) -> list[Any]:
        try:
            refusal = await self._claim(connection, run_id)
        except StoreRolledBack:
            # Those who look or tidy up have nobody to tell, and a resume is what it takes.
            if acknowledges and script.name != "resume":
                raise
            refusal = None
        except StoreOutOfDisk:
            # What only reads changes nothing before the server is told.
            if script.name not in _LOOKS and script.name != "eval_view":
                raise
            refusal = None
        return [refusal] if refusal is not None else await connection.request(commands)

    def _over(self, link: _Link) -> Exchange:
        async def exchange(commands: Sequence[Command], longer_s: float) -> tuple[list[Any], str]:
            replies, at = await self._exchange(link, commands, longer_s=longer_s)
            return replies, at.server

        return exchange

    async def _exchange(
        self,
        link: _Link,
        commands: Sequence[Command],
        script: Script | None = None,
        run_id: str = "",
        *,
        acknowledges: bool = True,
        longer_s: float = 0.0,
    ) -> tuple[list[Any], RespConnection]:
        """Send commands and wait for their replies; over which connection.

        What certainly did not run is sent again, for LOADING_TIMEOUT_S: the store loads its data, or it has become a
        replica and there are Sentinels that know the primary.
        """
        loop = asyncio.get_running_loop()
        timeout_s = self._timeout_s + longer_s
        until = loop.time() + LOADING_TIMEOUT_S
        while True:
            connection = await link.get()
            # The whole connection ends: later replies would wait behind the one that does not come. A timer costs half
            # of what asyncio.timeout does, and there is one for every call.
            late = loop.call_later(timeout_s, connection.abort, f"no answer within {timeout_s:g} s")
            try:
                if script is None or run_id in self._claimed[connection.tenure] or script.name == "view":
                    replies = await connection.request(commands)
                else:
                    replies = await self._claimed_first(connection, commands, script, run_id, acknowledges=acknowledges)
            except ConnectionLost as error:
                raise StoreUnavailable(self.name, str(error)) from error
            finally:
                late.cancel()
            refusal = _unrun(replies)
            if refusal is None:
                return replies, connection
            if _code(refusal) in _ELSEWHERE:
                self.primary.leave(connection, "it has become a replica")
                if self.address.sentinels is None:
                    raise self._fault(refusal) from refusal
            if loop.time() > until:
                raise StoreUnavailable(self.name, f"it goes on to answer: {refusal}") from refusal
            await asyncio.sleep(LOADING_PAUSE_S)

    def _checked(self, reply: Any) -> Any:  # noqa: ANN401
        if isinstance(reply, ReplyError):
            raise self._fault(reply) from reply
        return reply

    def _fault(self, reply: ReplyError) -> RolloutBufferError:
        message = str(reply)
        if reply.code == "OOM" or "OOM command not allowed" in message:
            return StoreOutOfMemory(self.name)
        # A transaction that is discarded quotes it.
        if "MISCONF" in message or (self._embedded and "NOREPLICAS" in message):
            return StoreOutOfDisk(self.name, message if "MISCONF" in message else "it is full but for a reserve")
        if _code(reply) in _UNAVAILABLE:
            return StoreUnavailable(self.name, message)
        if layout := _LAYOUT.search(message):
            return LayoutChanged(layout[1], str(SCHEMA_VERSION))
        if reply.code in {"NOAUTH", "WRONGPASS", "NOPERM"}:
            return StoreUnsuitable(self.name, message)
        return StoreFault(f"the store at {self.name} answered: {message}", store=self.name)


def _unrun(replies: Sequence[Any]) -> ReplyError | None:
    """The refusal by which nothing of a request ran (a transaction is refused when its commands are), or None."""
    if isinstance(replies[-1], ReplyError):
        for reply in replies:
            if isinstance(reply, ReplyError) and _code(reply) in {"LOADING", *_ELSEWHERE}:
                return reply
    return None


def _code(reply: ReplyError) -> str:
    # Before version 7 a script quotes the error of its command.
    return "READONLY" if "-READONLY " in str(reply) else reply.code
