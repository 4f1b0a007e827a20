"""StoreConnection: calls of scripts, payloads and single commands on one store.

Invariants: payloads and the script that indexes them go out in one transaction, so near maxmemory either both happen or
neither. Every wait ends in StoreUnavailable, StoreOutOfMemory, StoreOutOfDisk, StoreUnsuitable, LayoutChanged or
NotReplicated. Each other mechanism has its module: deadlines and repeats (exchange.py), what a server is told first
(claims.py), and what an answer waits for (confirmation.py).
"""

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from buffer_service.domain.command import Command
from buffer_service.domain.ops import UNPUSHED_MS, Buffer
from buffer_service.store.address import Address
from buffer_service.store.keys import ALONE, index_key
from buffer_service.store.primary import Primary
from buffer_service.store.scripts import load_scripts
from buffer_service.store.suitability import fields_of
from buffer_service.store.transport.claims import Claims
from buffer_service.store.transport.confirmation import Confirmation
from buffer_service.store.transport.exchange import Exchange
from buffer_service.store.transport.link import Link
from buffer_service.store.transport.meter import CallMeter, NoMeter, measured
from buffer_service.store.transport.refusals import NotRun, Refusals, is_moved, is_torn
from buffer_service.store.transport.replication import Replication, Waits, Wanted, no_data
from buffer_wire.errors import StoreUnavailable
from buffer_wire.payloads.keys import part_keys, parts_of, portions
from buffer_wire.payloads.parts import cut
from buffer_wire.resp.encoding import Part, Parts
from buffer_wire.resp.errors import ReplyError
from buffer_wire.resp.protocol import RespConnection

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Shared:
    """Knowledge of one process of the runs of a cluster, on whichever node they are."""

    claims: Claims
    replication: Replication


class StoreConnection:
    """Connections to one store: one for scripts and commands, and two for payloads, which would hold the others up."""

    names = ALONE
    is_spread = False

    def __init__(
        self,
        store: str | Primary,
        *,
        ca: Path | None = None,
        embedded: bool = False,
        timeout_s: float = 30.0,
        meter: CallMeter | None = None,
        apart: bool = False,
        shared: Shared | None = None,
        write: Callable[[], Parts] = no_data,
    ) -> None:
        """`store` is an address, or one primary of a cluster, which has `shared`, and `write` for its replicas.

        `apart`: the scripts are those for payloads on servers of their own.
        """
        if isinstance(store, str):
            store = Primary(dataclasses.replace(Address.parse(store), ca=ca))
        self.primary = store
        self.address = store.address
        self.name = self.address.shown
        self._scripts = load_scripts(apart=apart)
        self._meter = meter or NoMeter()
        self._control = Link(self.primary)
        self._writes = Link(self.primary)
        self._reads = Link(self.primary)
        self._refusals = Refusals(self.name, embedded=embedded)
        self._exchange = Exchange(self.primary, self._refusals, timeout_s)
        self._claims = shared.claims if shared else Claims(self._refusals, self._scripts["claim"])
        self._replication = shared.replication if shared else Replication(self._policy)
        waits = Waits(self.name, lambda: self._exchange.over(Link(self.primary)), write)
        self._confirmation = Confirmation(
            self._exchange, self._control, self._refusals, self._replication, waits, self._claims
        )

    async def open(self) -> None:
        """Load the scripts. Raises StoreUnavailable."""
        await self._load_scripts()

    async def connect(self, on_push: Callable[[Any], None] | None = None) -> RespConnection:
        """A connection of its own, for messages. Raises StoreUnavailable, StoreUnsuitable."""
        return await self.primary.connect(on_push)

    async def reach(self) -> None:
        """Have a connection for scripts. Raises NotRun, StoreUnsuitable."""
        try:
            await self._control.get()
        except StoreUnavailable as error:
            raise NotRun(error) from error

    async def close(self) -> None:
        """Close all connections."""
        await self.primary.close()

    async def run(self, command: Command[Any], *arguments: bytes) -> Buffer:
        """Run a command's script with these arguments; its packed reply, which waits for what it acknowledges.

        Raises StoreRolledBack beside what the transport raises, and NotRun where nothing ran at a node of a cluster.
        """
        request = [self._script_call(command, *arguments)]
        return await measured(self._meter, command.script, self._decide(self._control, request, command))

    async def store_and_run(self, command: Command[Any]) -> Buffer:
        """Stage and store a command's payloads and run the script that indexes them, all in one transaction.

        Parts are written before it, one by one, for it would hold the store up. They expire until it takes that away.
        """
        staged: list[Part] = []
        stored: list[Part] = []
        kept: list[Parts] = []
        tenure = ""
        for key, body in command.payloads:
            staged += (0, key)
            if parts_of(key):
                tenure = await measured(self._meter, "write", self._write_parts(key, body, tenure))
                kept += [("PERSIST", part.key) for part in part_keys(key)]
            else:
                stored += (key, body)
        request: list[Parts] = [
            ("MULTI",),
            ("ZADD", index_key(command.run_id, "staging"), *staged),
            *([("MSET", *stored)] if stored else []),
            *kept,
            self._script_call(command, command.arguments),
            ("EXEC",),
        ]
        return await measured(self._meter, command.script, self._decide(self._writes, request, command, tenure))

    async def write(self, part_key: str, body: Buffer) -> bool:
        """Write a part of a payload that no push has named yet; False where there is one of that key."""
        command = ("SET", part_key, body, "NX", "PX", UNPUSHED_MS)
        return await measured(self._meter, "write", self._single(self._writes, command)) is not None

    async def _write_parts(self, key: str, body: Buffer, tenure: str) -> str:
        """Write a payload in parts, which have to lie on the server of this tenure ('': any); its tenure."""
        for part, piece in cut(key, [body]):
            command = ("SET", part.key, piece, "PX", UNPUSHED_MS)
            (reply,), at = await self._exchange.commands(self._writes, [command])
            self._refusals.checked(reply)
            tenure = tenure or at.tenure
            self._check_tenure(at, tenure)
        return tenure

    def _check_tenure(self, connection: RespConnection, tenure: str) -> None:
        if tenure and connection.tenure != tenure:
            raise StoreUnavailable(self.name, "the primary has changed between the parts of a payload and their push")

    def _script_call(self, command: Command[Any], *arguments: bytes) -> Parts:
        return ("EVALSHA", self._scripts[command.script].sha, 1, index_key(command.run_id, "run"), *arguments)

    async def tenure(self) -> str:
        """Term of the server as primary. Raises StoreUnavailable."""
        return (await self._control.get()).tenure

    async def wanted(self, run_id: str) -> Wanted:
        """Replicas that the run's policy has acknowledgements wait for."""
        return await self._replication.wanted(run_id)

    async def fetch(self, payload_keys: Sequence[str]) -> list[Buffer | None]:
        """Payloads in order, None where one is gone; at most PORTION_BYTES are asked for at once."""
        bodies: list[Buffer | None] = []
        for portion in portions(payload_keys):
            bodies += await measured(self._meter, "fetch", self._single(self._reads, ("MGET", *portion)))
        return bodies

    async def fetch_part(self, payload_key: str, first: int, size: int) -> Buffer:
        """Bytes [first, first + size) of a payload, as far as it goes; empty when it is gone."""
        command = ("GETRANGE", payload_key, first, first + size - 1)
        part: Buffer = await measured(self._meter, "fetch", self._single(self._reads, command))
        return part

    async def existing(self, run_ids: Sequence[str]) -> list[str]:
        """Those of the runs that exist."""
        keys = [index_key(run_id, "run") for run_id in run_ids]
        if not keys or await self.command("EXISTS", *keys) == len(keys):
            return list(run_ids)
        return [run_id for run_id, key in zip(run_ids, keys, strict=True) if await self.command("EXISTS", key)]

    async def infos(self) -> list[dict[str, str]]:
        """Fields of INFO of every server that decides."""
        return [fields_of(await self.command("INFO"))]

    async def command(self, *parts: Part) -> Any:  # noqa: ANN401 - replies are of any type
        """Send one command."""
        return await measured(self._meter, "command", self._single(self._control, parts))

    async def _decide(self, link: Link, parts: Sequence[Parts], command: Command[Any], tenure: str = "") -> Buffer:
        """The script's reply; `parts` call it alone, or at the end of a transaction, on the server of that tenure."""

        def request(connection: RespConnection) -> Awaitable[list[Any]]:
            self._check_tenure(connection, tenure)
            return self._claims.request(connection, parts, command)

        replies, at = await self._exchange.request(link, request)
        reply = self._script_reply(replies)
        if isinstance(reply, ReplyError) and reply.code == "NOSCRIPT":
            # A transaction again as a whole: the server may be another one by now, without the payloads.
            await self._load_scripts()
            replies, at = await self._exchange.request(link, request)
            reply = self._script_reply(replies)
        if isinstance(reply, ReplyError):
            raise self._failure(command, reply) from reply
        return await self._confirmation.kept(command, at, reply) if command.acknowledges else reply

    def _failure(self, command: Command[Any], reply: ReplyError) -> Exception:
        if is_moved(reply):
            return NotRun(StoreUnavailable(self.name, f"it goes on to answer: {reply}"), reply)
        if is_torn(reply):
            self._claims.tear(command.run_id)
            why = f"a slot moved key by key under the script {command.script}, so run {command.run_id} is paused"
            log.error("a run may be torn", run=command.run_id, script=command.script, why=str(reply))
            return StoreUnavailable(self.name, why)
        return self._refusals.fault(reply)

    async def _policy(self, *command: str) -> Any:  # noqa: ANN401
        return await self._single(self._control, command)

    def _script_reply(self, replies: Sequence[Any]) -> Any:  # noqa: ANN401
        *queued, reply = replies
        if queued:
            for refusal in queued:
                self._refusals.checked(refusal)
            reply = self._refusals.checked(reply)[-1]
        return reply

    async def _single(self, link: Link, command: Parts) -> Any:  # noqa: ANN401
        (reply,), _ = await self._exchange.commands(link, [command])
        return self._refusals.checked(reply)

    async def _load_scripts(self) -> None:
        commands = [("SCRIPT", "LOAD", script.source) for script in self._scripts.values()]
        replies, _ = await self._exchange.commands(self._control, commands)
        for reply in replies:
            self._refusals.checked(reply)
