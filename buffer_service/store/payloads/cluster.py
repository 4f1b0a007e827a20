"""Payloads on a cluster, spread over its shards by their keys, beside an index that decides.

Invariants: a payload is staged at the index, then stored on its shard or taken over from its pusher there. Once that is
safe as the run's policy asks for, it is indexed. What a script has not indexed stays staged or goes to trash. A key
that a shard's primary does not have is gone; while a shard is away its keys are StoreUnavailable.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from buffer_service.commands.replies import head_of, parse
from buffer_service.commands.staging import LEFT_ALONE, STAGED_BEFORE, stage, unneeded
from buffer_service.domain.command import Command
from buffer_service.domain.ops import UNPUSHED_MS, Buffer
from buffer_service.store.keys import index_key
from buffer_service.store.payloads.node import Traffic
from buffer_service.store.payloads.shards import Errand, Shards, failure_of
from buffer_service.store.payloads.tier import Deleted
from buffer_service.store.payloads.topology import Place
from buffer_service.store.transport.index import Index
from buffer_service.store.transport.meter import CallMeter, measured
from buffer_service.store.transport.replication import Wanted
from buffer_wire.errors import StoreFault
from buffer_wire.payloads.keys import PORTION_BYTES, Part, part_keys, size_of, within

_THERE = ord("1")


class ClusterPayloads:
    """Implements PayloadTier; `index` is the connection to the store that decides."""

    stores_first = True

    def __init__(self, index: Index, shards: Shards, meter: CallMeter) -> None:
        self._index = index
        self._shards = shards
        self._meter = meter

    async def store(self, command: Command[Any]) -> bytes:
        """See PayloadTier.store."""
        staging = stage(command)
        _, (marks,) = parse(command.run_id, await self._index.run(staging, staging.arguments))
        wanted = await self._index.wanted(command.run_id)
        return await measured(self._meter, "put", self._store(command, marks, wanted))

    async def store_and_run(self, command: Command[Any]) -> Buffer:
        """See PayloadTier.store_and_run."""
        there = await self.store(command) if command.there is None else command.there
        if not command.written:
            return await self._index.run(command, command.arguments)
        reply = await self._index.run(command, command.arguments, there)
        if head_of(reply) == (b"error", b"unknown_run"):
            # It was deleted after it was asked for: nobody else comes for what was taken over.
            await self.delete(command.run_id, [one.key for one in command.written if there[one.place] == _THERE])
        elif dropped := unneeded(command, reply):
            # Before the answer, after which the same key may be written again. What is left of them is on trash.
            with contextlib.suppress(StoreFault):
                if deleted := (await self.delete(command.run_id, dropped)).keys:
                    await self._index.command("SREM", index_key(command.run_id, "trash"), *deleted)
        return reply

    async def get(self, payload_keys: Sequence[str]) -> list[Buffer | None]:
        """See PayloadTier.get."""
        return await measured(self._meter, "fetch", self._get(payload_keys))

    async def part(self, payload_key: str, first: int, size: int) -> Buffer:
        """See PayloadTier.part."""
        pieces = [
            Errand(part.key, [("GETRANGE", part.key, start, stop - 1)])
            for part, start, stop in within(payload_key, first, size)
        ]
        await measured(self._meter, "fetch", self._shards.run(Traffic.READS, pieces))
        if failure := failure_of(pieces):
            raise failure
        return b"".join(piece.replies[0] for piece in pieces)

    async def write_part(self, part_key: str, body: Buffer) -> bool:
        """See PayloadTier.write_part."""
        errand = Errand(part_key, [("SET", part_key, body, "NX", "PX", UNPUSHED_MS)])
        await measured(self._meter, "put", self._shards.run(Traffic.WRITES, [errand]))
        if errand.failure:
            raise errand.failure
        return errand.replies[0] is not None

    async def read_part(self, part_key: str) -> Buffer | None:
        """See PayloadTier.read_part."""
        errand = Errand(part_key, [("GET", part_key)])
        await measured(self._meter, "fetch", self._shards.run(Traffic.READS, [errand]))
        if errand.failure:
            raise errand.failure
        body: Buffer | None = errand.replies[0]
        return body

    async def delete(self, run_id: str, payload_keys: Sequence[str]) -> Deleted:
        """See PayloadTier.delete. Nobody waits for a shard that is away: its keys are deleted another time."""
        if not payload_keys:
            return Deleted(())
        wanted = await self._index.wanted(run_id)
        errands = [(key, [Errand(part.key, [("UNLINK", part.key)]) for part in part_keys(key)]) for key in payload_keys]
        flat = [errand for _, its in errands for errand in its]
        await measured(self._meter, "delete", self._shards.run(Traffic.DELETIONS, flat, wanted, patience_s=0))
        return Deleted([key for key, its in errands if failure_of(its) is None], failure_of(flat))

    async def _store(self, command: Command[Any], marks: bytes, wanted: Wanted) -> bytes:
        """Store a command's payloads and take over those that were written: a digit for each group, 1 where its payload
        is there.
        """
        puts = [
            Errand(part.key, [("SET", part.key, piece)])
            for key, body in command.payloads
            for part, piece in _pieces(key, body)
        ]
        keeps = [
            (written, mark, [_take_over(part) for part in part_keys(written.key)])
            for written, mark in zip(command.written, marks, strict=True)
            if mark != LEFT_ALONE
        ]
        errands = [*puts, *(errand for _, _, its in keeps for errand in its)]
        await self._shards.run(Traffic.WRITES, errands, wanted)
        if failure := failure_of(errands):
            # The caller comes again with other keys. What may yet be on its way stays staged for the sweep.
            await self._delete_stored(puts)
            raise failure
        there = bytearray([_THERE]) * (len(command.payloads) + len(command.written))
        for written in command.written:
            there[written.place] = ord("0")
        put_back: list[Errand] = []
        for written, mark, its in keeps:
            if all(_is_there(errand, part, mark) for errand, part in zip(its, part_keys(written.key), strict=True)):
                there[written.place] = _THERE
            elif mark != STAGED_BEFORE:
                put_back += [
                    Errand(errand.key, [("PEXPIRE", errand.key, errand.replies[1])])
                    for errand in its
                    if errand.replies[1] >= 0
                ]
        await self._shards.run(Traffic.WRITES, put_back)
        return bytes(there)

    async def _delete_stored(self, puts: Iterable[Errand]) -> None:
        stored = [Errand(put.key, [("UNLINK", put.key)]) for put in puts if put.replies]
        await self._shards.run(Traffic.DELETIONS, stored, patience_s=0)

    async def _get(self, payload_keys: Sequence[str]) -> list[Buffer | None]:
        parts = [[(part, Errand(part.key, [("GET", part.key)])) for part in part_keys(key)] for key in payload_keys]
        by_place = defaultdict[Place | None, list[tuple[Part, Errand]]](list)
        for part, errand in (each for its in parts for each in its):
            by_place[self._shards.place_of(part.key)].append((part, errand))
        await asyncio.gather(*(self._read(its) for its in by_place.values()))
        if failure := failure_of(errand for its in parts for _, errand in its):
            raise failure
        return [_joined(key, its) for key, its in zip(payload_keys, parts, strict=True)]

    async def _read(self, parts: Sequence[tuple[Part, Errand]]) -> None:
        """Read from one shard, a portion at a time; ends with the first portion that fails."""
        for portion in _portions(parts):
            await self._shards.run(Traffic.READS, portion)
            if failure := failure_of(portion):
                for _, errand in parts:
                    errand.failure = errand.failure or failure
                return


def _pieces(key: str, body: Buffer) -> Iterator[tuple[Part, Buffer]]:
    parts, at = part_keys(key), 0
    if len(parts) == 1:
        yield parts[0], body
        return
    for part in parts:
        yield part, memoryview(body)[at : at + part.size]
        at += part.size


def _take_over(part: Part) -> Errand:
    # What changes something comes last, so that the whole may be repeated elsewhere when that was refused.
    return Errand(part.key, [("STRLEN", part.key), ("PTTL", part.key), ("PERSIST", part.key)])


def _is_there(errand: Errand, part: Part, mark: int) -> bool:
    """True for a part as its pusher wrote it, which expired until now, or is staged since an earlier push."""
    size, ttl_ms, persisted = errand.replies
    return size == part.size and ((ttl_ms >= 0 and persisted == 1) or mark == STAGED_BEFORE)


def _portions(parts: Iterable[tuple[Part, Errand]]) -> Iterator[list[Errand]]:
    portion: list[Errand] = []
    size = 0
    for part, errand in parts:
        if portion and size + part.size > PORTION_BYTES:
            yield portion
            portion, size = [], 0
        portion.append(errand)
        size += part.size
    if portion:
        yield portion


def _joined(key: str, parts: Sequence[tuple[Part, Errand]]) -> Buffer | None:
    """A payload, in one piece; None where a part is gone."""
    if len(parts) == 1:
        body: Buffer | None = parts[0][1].replies[0]
        return body
    whole, at = memoryview(bytearray(size_of(key))), 0
    for part, errand in parts:
        body = errand.replies[0]
        if body is None or len(body) != part.size:
            return None
        whole[at : at + part.size] = body
        at += part.size
    return whole
