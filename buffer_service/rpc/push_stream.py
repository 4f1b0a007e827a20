"""One push stream: bundles are read ahead a little, pushed in order, and acknowledged in order.

What was read ahead goes to the store in one call where it belongs to the same run, up to about 1 MiB: with small
groups the call costs more than the groups. Memory: at most WINDOW bundles, and beyond the first one only while the
process's byte budget has room.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from itertools import islice

import grpc.aio

from buffer_service.domain import ops
from buffer_service.domain.ports import RunStore
from buffer_service.observability.metrics import RpcMetrics
from buffer_service.rpc.budget import ByteBudget
from buffer_service.rpc.convert import groups as convert
from buffer_service.rpc.drain import Drain
from buffer_service.rpc.pushes import Pushes
from buffer_wire.codec import split_push
from buffer_wire.errors import RolloutBufferError
from rollout_buffer.v1 import groups_pb2 as pb

WINDOW = 4
MERGED_BYTES = 1 << 20

RawContext = grpc.aio.ServicerContext[bytes, bytes]


Entry = ops.NewGroup | pb.PushAck
"""A group to push, or the refusal of one that breaks a rule."""


@dataclass(slots=True)
class _Bundle:
    run_id: str
    seen_revision: int
    sequence: int
    size_bytes: int
    entries: list[Entry]


@dataclass(frozen=True, slots=True)
class PushParts:
    """What every push stream of a process shares."""

    store: RunStore
    pushes: Pushes
    budget: ByteBudget
    drain: Drain
    metrics: RpcMetrics
    max_payload_bytes: int


class PushStream:
    """Serves one PushGroups RPC."""

    def __init__(self, context: RawContext, parts: PushParts) -> None:
        self._context = context
        self._parts = parts
        self._read: deque[_Bundle] = deque()
        self._end: RolloutBufferError | None = None
        self._ended = False
        self._arrived = asyncio.Event()
        self._room = asyncio.Semaphore(WINDOW)
        self._held_bytes = 0

    async def run(self) -> None:
        """Serve until the client ends its side, or an error ends both."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read_ahead())
                await self._push_all()
        finally:
            self._parts.budget.give(self._held_bytes)

    # ── reading ──────────────────────────────────────────────────────────────

    async def _read_ahead(self) -> None:
        try:
            sequence = 1
            while (message := await self._next_message()) is not None:
                self._take(message, sequence)
                sequence += 1
        except RolloutBufferError as error:
            # Raised again after the acknowledgement of what was read before it.
            self._end = error
        self._ended = True
        self._arrived.set()

    async def _next_message(self) -> bytes | None:
        budget = self._parts.budget
        async with self._parts.drain.interruptible():
            await self._room.acquire()
            if not budget.has_room:
                await budget.until(lambda: budget.has_room or not self._held_bytes)
            message = await self._context.read()
        return None if message is grpc.aio.EOF else message  # type: ignore[attr-defined]

    def _take(self, message: bytes, sequence: int) -> None:
        self._parts.budget.take(len(message))
        self._held_bytes += len(message)
        self._parts.metrics.received("PushGroups", len(message))
        bundle = convert.parsed("PushGroupsRequest", split_push, message)
        convert.check_bundle(bundle, sequence)
        entries = [convert.entry(body, self._parts.max_payload_bytes) for body in bundle.groups]
        run = bundle.run
        self._read.append(_Bundle(run.run_id, run.seen_revision, sequence, len(message), entries))
        self._arrived.set()

    # ── pushing ──────────────────────────────────────────────────────────────

    async def _push_all(self) -> None:
        while bundles := await self._next_bundles():
            for response in await self._push(bundles):
                await self._context.write(response.SerializeToString())
            for bundle in bundles:
                self._held_bytes -= bundle.size_bytes
                self._parts.budget.give(bundle.size_bytes)
                self._room.release()
        if self._end is not None:
            raise self._end

    async def _next_bundles(self) -> list[_Bundle]:
        """What was read and may go into one call; empty at the end of the stream."""
        while not self._read and not self._ended:
            self._arrived.clear()
            await self._arrived.wait()
        bundles: list[_Bundle] = []
        size = 0
        while self._read and (not bundles or self._read[0].run_id == bundles[0].run_id):
            size += self._read[0].size_bytes
            if bundles and size > MERGED_BYTES:
                break
            bundles.append(self._read.popleft())
        return bundles

    async def _push(self, bundles: list[_Bundle]) -> list[pb.PushGroupsResponse]:
        seen = max(bundle.seen_revision for bundle in bundles)
        entries = [entry for bundle in bundles for entry in bundle.entries]
        counts = [len(bundle.entries) for bundle in bundles]
        for bundle in bundles:
            # Bodies are let go as soon as the store has them.
            bundle.entries.clear()
        revision, acks, published = await push_entries(self._parts, bundles[0].run_id, entries, seen)
        settled = iter(acks)
        return [
            convert.to_push_response(revision, bundle.sequence, list(islice(settled, count)), published)
            for bundle, count in zip(bundles, counts, strict=True)
        ]


async def push_entries(
    parts: PushParts, run_id: str, entries: list[Entry], seen_revision: int
) -> tuple[int, list[pb.PushAck], ops.WeightVersion]:
    """Push what is valid of `entries`, which is emptied; (revision, acknowledgements in order, published weights)."""
    groups = [entry for entry in entries if isinstance(entry, ops.NewGroup)]
    refused = {i: entry for i, entry in enumerate(entries) if isinstance(entry, pb.PushAck)}
    total = len(entries)
    entries.clear()
    facts = [group.facts for group in groups]
    if groups:
        result = await parts.pushes.push(run_id, groups, seen_revision)
    else:
        view = await parts.store.weights(run_id)
        result = ops.PushResult(view.revision, [], view.published)
    parts.metrics.pushed(result.outcomes)
    acks = (convert.to_ack(pushed, fact) for pushed, fact in zip(result.outcomes, facts, strict=True))
    return result.revision, [refused.get(i) or next(acks) for i in range(total)], result.published
