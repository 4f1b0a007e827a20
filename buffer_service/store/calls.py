"""Calls: commands carried out on a connection, whose refusals are the contract's errors."""

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from buffer_service.commands import abandon_push
from buffer_service.commands.groups import empty_trash
from buffer_service.commands.replies import parse, text
from buffer_service.domain.command import Command, Fields
from buffer_service.store.keys import index_key
from buffer_service.store.payloads.tier import Deleted, PayloadTier
from buffer_service.store.transport.index import Index
from buffer_wire.errors import (
    LayoutChanged,
    NotReplicated,
    StoreFault,
    StoreOutOfDisk,
    StoreOutOfMemory,
    UnknownRun,
)

T = TypeVar("T")


class Calls:
    """A connection and the runs that are known to exist on it."""

    def __init__(self, connection: Index, tier: PayloadTier) -> None:
        self._connection = connection
        self._tier = tier
        self._known: set[str] = set()

    async def call(self, command: Command[T]) -> T:
        """See domain.ports.RunStore.call."""
        tag, fields = await self._reply(command, command.arguments)
        while tag == "more" and command.again is not None:
            tag, fields = await self._reply(command, command.again)
        result = command.unpack(tag, fields)
        if command.rest is not None:
            more = fields[-1]
            while more:
                _, (*_, more) = await self._reply(command.rest, command.rest.arguments)
        if command.trash:
            await self.delete_trash(command.run_id)
        return result

    @property
    def stores_first(self) -> bool:
        """True when payloads are stored before their script is run, not with it."""
        return self._tier.stores_first

    async def store(self, command: Command[Any]) -> bytes | None:
        """Store the payloads of a command that is to be called later, by itself or with others; see PayloadTier.store.

        Raises UnknownRun, NotReplicated, StoreFault.
        """
        return await self._with_payloads(command, self._tier.store)

    def note(self, run_id: str) -> None:
        """Note that the run exists."""
        self._known.add(run_id)

    def forget(self, run_id: str) -> None:
        """Forget the run: it exists no more."""
        self._known.discard(run_id)

    async def delete_trash(self, run_id: str, at_once: int = 500) -> Deleted:
        """Delete payloads that nothing refers to any more: the keys that were on trash, and why some still are.

        The keys leave the trash after their payloads are gone, so a crash in between repeats a deletion and loses none.
        No transaction: a server that is out of memory refuses to queue commands, those that free some too.
        """
        deleted = list[str]()
        while True:
            gone, is_more = await self._delete_some(run_id, at_once)
            deleted += gone.keys
            # Where most are on servers that are away, the next look would find little else.
            if not is_more or 2 * len(gone.keys) < at_once:
                return Deleted(deleted, gone.away)

    async def _delete_some(self, run_id: str, at_once: int) -> tuple[Deleted, bool]:
        """A portion of the trash, and whether there may be more."""
        if not self._tier.stores_first:
            gone = await self.call(empty_trash(run_id, at_once))
            return Deleted(gone), len(gone) == at_once
        trash = index_key(run_id, "trash")
        keys = [text(key) for key in await self._connection.command("SRANDMEMBER", trash, at_once)]
        deleted = await self._tier.delete(run_id, keys)
        if deleted.keys:
            await self._connection.command("SREM", trash, *deleted.keys)
        return deleted, len(keys) == at_once

    async def _reply(self, command: Command[Any], arguments: bytes) -> tuple[str, Fields]:
        """Tag and fields of one call of the command's script. Raises what its refusal stands for."""
        if command.payloads or command.written:
            return await self._with_payloads(command, self._reply_to_payloads)
        return parse(command.run_id, await self._connection.run(command, arguments))

    async def _reply_to_payloads(self, command: Command[Any]) -> tuple[str, Fields]:
        return parse(command.run_id, await self._tier.store_and_run(command))

    async def _with_payloads(self, command: Command[Any], do: Callable[[Command[Any]], Awaitable[T]]) -> T:
        """Do something with a command that has payloads.

        Nothing is written for a run that does not exist; a payload that the script did not take over is deleted.
        """
        run_id, keys = command.run_id, [key for key, _ in command.payloads]
        await self._check_exists(run_id)
        try:
            return await do(command)
        except (LayoutChanged, UnknownRun, StoreOutOfMemory):
            self._known.discard(run_id)
            await self._delete_staged(run_id, keys)
            raise
        except (NotReplicated, StoreOutOfDisk):
            # It may have run. The caller comes again with the same groups under new keys: nobody would come for those
            # that are blocked.
            with contextlib.suppress(StoreFault):
                await self.call(abandon_push(run_id, keys))
            raise

    async def _check_exists(self, run_id: str) -> None:
        if run_id not in self._known:
            if not await self._connection.command("EXISTS", index_key(run_id, "run")):
                raise UnknownRun(run_id)
            self._known.add(run_id)

    async def _delete_staged(self, run_id: str, keys: Sequence[str]) -> None:
        if keys:
            await self._tier.delete(run_id, keys)
            await self._connection.command("ZREM", index_key(run_id, "staging"), *keys)
