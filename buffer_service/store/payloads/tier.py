"""Payload tier: where the bytes of payloads lie, and how a script that indexes them is run.

Invariants: what a script indexes is stored before it, and is staged until then. A payload that is gone is None; one
whose server is away is StoreUnavailable.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from buffer_service.domain.command import Command
from buffer_service.domain.ops import Buffer
from buffer_service.store.transport.connection import StoreConnection
from buffer_wire.errors import StoreUnavailable


@dataclass(frozen=True, slots=True)
class Deleted:
    """Keys whose deletion was answered, and why the others' was not."""

    keys: Sequence[str]
    away: StoreUnavailable | None = None


class PayloadTier(Protocol):
    """The place of payloads. Its errors are those of the transport."""

    async def store_and_run(self, command: Command[Any]) -> Buffer:
        """Store a command's payloads, take over those that pushers wrote, and run the script that indexes them."""
        ...

    async def get(self, payload_keys: Sequence[str]) -> list[Buffer | None]:
        """Payloads in order, None where one is gone."""
        ...

    async def part(self, payload_key: str, first: int, size: int) -> Buffer:
        """Bytes [first, first + size) of a payload, as far as it goes; empty when it is gone."""
        ...

    async def delete(self, run_id: str, payload_keys: Sequence[str]) -> Deleted:
        """Delete payloads that nothing refers to; of those on servers that are away, none."""
        ...


class WithIndex:
    """Payloads on the index's own server: one transaction stages and stores them, and runs the script."""

    def __init__(self, connection: StoreConnection) -> None:
        self._connection = connection

    async def store_and_run(self, command: Command[Any]) -> Buffer:
        """See PayloadTier.store_and_run. Scripts look at what pushers wrote by themselves."""
        if not command.payloads:
            return await self._connection.run(command, command.arguments)
        return await self._connection.store_and_run(command)

    async def get(self, payload_keys: Sequence[str]) -> list[Buffer | None]:
        """See PayloadTier.get."""
        return await self._connection.fetch(payload_keys)

    async def part(self, payload_key: str, first: int, size: int) -> Buffer:
        """See PayloadTier.part."""
        return await self._connection.fetch_part(payload_key, first, size)

    async def delete(self, run_id: str, payload_keys: Sequence[str]) -> Deleted:
        """See PayloadTier.delete."""
        del run_id  # one server keeps them all
        if payload_keys:
            await self._connection.command("UNLINK", *payload_keys)
        return Deleted(payload_keys)
