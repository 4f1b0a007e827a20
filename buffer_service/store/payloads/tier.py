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
from buffer_wire.errors import RolloutBufferError
from buffer_wire.payloads.keys import all_part_keys, part_keys, parts_of, portions, size_of, within


@dataclass(frozen=True, slots=True)
class Deleted:
    """Keys whose deletion was answered, and why the others' was not."""

    keys: Sequence[str]
    away: RolloutBufferError | None = None


class PayloadTier(Protocol):
    """The place of payloads. Its errors are those of the transport."""

    @property
    def stores_first(self) -> bool:
        """True when payloads are stored before their script is run, not with it."""
        ...

    async def write_part(self, part_key: str, body: Buffer) -> bool:
        """Write a part of a payload as its pusher would have, to expire; False where there is one of that key."""
        ...

    async def read_part(self, part_key: str) -> Buffer | None:
        """A part of a payload; None where it is gone."""
        ...

    async def store(self, command: Command[Any]) -> bytes | None:
        """Store a command's payloads, and take over those that pushers wrote, for its script to be run later; what the
        script is to be told (Command.there). None where all of that is done with the script.
        """
        ...

    async def store_and_run(self, command: Command[Any]) -> Buffer:
        """Run the script that indexes a command's payloads, after `store` where that has not been done."""
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

    stores_first = False

    def __init__(self, connection: StoreConnection) -> None:
        self._connection = connection

    async def store(self, command: Command[Any]) -> None:
        """See PayloadTier.store."""

    async def store_and_run(self, command: Command[Any]) -> Buffer:
        """See PayloadTier.store_and_run. Scripts look at what pushers wrote by themselves."""
        if not command.payloads:
            return await self._connection.run(command, command.arguments)
        return await self._connection.store_and_run(command)

    async def write_part(self, part_key: str, body: Buffer) -> bool:
        """See PayloadTier.write_part."""
        return await self._connection.write(part_key, body)

    async def read_part(self, part_key: str) -> Buffer | None:
        """See PayloadTier.read_part."""
        (body,) = await self._connection.fetch([part_key])
        return body

    async def get(self, payload_keys: Sequence[str]) -> list[Buffer | None]:
        """See PayloadTier.get."""
        bodies: list[Buffer | None] = []
        for portion in portions(payload_keys):
            if parts_of(portion[0]):
                bodies.append(await self._joined(portion[0]))
            else:
                bodies += await self._connection.fetch(portion)
        return bodies

    async def _joined(self, payload_key: str) -> Buffer | None:
        """A payload in parts as one; None where a part is gone, or has another size."""
        whole, filled = memoryview(bytearray(size_of(payload_key))), 0
        for part in part_keys(payload_key):
            body = await self.read_part(part.key)
            if body is None or len(body) != part.size:
                return None
            whole[filled : filled + part.size] = body
            filled += part.size
        return whole

    async def part(self, payload_key: str, first: int, size: int) -> Buffer:
        """See PayloadTier.part."""
        found = bytearray()
        for part, start, stop in within(payload_key, first, size):
            piece = await self._connection.fetch_part(part.key, start, stop - start)
            found += piece
            if len(piece) < stop - start:
                break
        return found

    async def delete(self, run_id: str, payload_keys: Sequence[str]) -> Deleted:
        """See PayloadTier.delete."""
        del run_id  # one server keeps them all
        if payload_keys:
            await self._connection.command("UNLINK", *all_part_keys(payload_keys))
        return Deleted(payload_keys)
