"""Push stream: bundles are read ahead a little, pushed in order, and acknowledged in order.

Bundles that were read ahead go to the store in one call where they belong to the same run. A call costs more than a
small group, and waking up for its reply more than a large one. At most WINDOW bundles are under way, and beyond the
first one only while the process's byte budget has room. Bundles are in memory from when they are read, for which there
has to be room, until the store has them. Groups that a full queue blocks lie in the store.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.ports import RunStore
from buffer_service.observability.metrics import RpcMetrics
from buffer_service.rpc.convert import fields
from buffer_service.rpc.convert import groups as convert
from buffer_service.rpc.convert.groups import Entry
from buffer_service.rpc.flow.ages import StreamAges
from buffer_service.rpc.flow.budget import ByteBudget
from buffer_service.rpc.flow.drain import Drain
from buffer_service.rpc.flow.pushes import Pushes
from buffer_service.rpc.flow.room import STALLED_S, GaveWay, Incoming, RawContext, Share
from buffer_service.rpc.messages import parsed
from buffer_service.security.gate import caller
from buffer_wire.codec import split_push
from buffer_wire.errors import RolloutBufferError
from buffer_wire.revision import Revision
from rollout_buffer.v1 import groups_pb2 as pb

WINDOW = 4
MERGED_BYTES = 4 << 20
IDLE_S = 1.0
"""Silence between two bundles after which a stream may be ended in order, when others wait for room."""


@dataclass(slots=True)
class _Bundle:
    run_id: str
    seen: Revision
    sequence: int
    size_bytes: int
    entries: list[Entry]
    share: Share


@dataclass(frozen=True, slots=True)
class PushParts:
    """Parts that the push streams of a process share."""

    store: RunStore
    pushes: Pushes
    budget: ByteBudget
    incoming: Incoming
    drain: Drain
    ages: StreamAges
    metrics: RpcMetrics
    limits: convert.Limits


class PushStream:
    """Serves one PushGroups RPC."""

    def __init__(self, context: RawContext, parts: PushParts) -> None:
        self._context = context
        self._parts = parts
        self._read: deque[_Bundle] = deque()
        self._held = 0
        self._held_bytes = 0
        self._shares: set[Share] = set()
        self._expected = parts.incoming.expected()
        self._end: RolloutBufferError | None = None
        self._ended = False
        self._changed = asyncio.Event()
        """Set when something was read, or when what was read is acknowledged."""

    async def run(self) -> None:
        """Serve until the client ends its side, an error ends both, or the stream is old and what it has is pushed."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read_ahead())
                await self._push_all()
        finally:
            self._parts.budget.give(self._held_bytes)
            for share in self._shares:
                share.close()
            # An error remembers where it was raised: a cycle with all that this holds.
            self._read.clear()
            self._end = None

    # ── reading ──────────────────────────────────────────────────────────────

    async def _read_ahead(self) -> None:
        sequence = 0
        try:
            async with self._parts.drain.interruptible(), self._parts.ages.limit("PushGroups"):
                while await self._read_one(sequence + 1):
                    sequence += 1
        except RolloutBufferError as error:
            # Raised again after the acknowledgement of what was read before it.
            self._end = error
        self._ended = True
        self._changed.set()

    async def _read_one(self, sequence: int) -> bool:
        """False at the end. The message is not kept: a wait for the next must not hold on to it."""
        await self._allowed()
        # The first is on its way when a stream is opened, and may be large.
        patience_s = IDLE_S if sequence > 1 else STALLED_S
        try:
            message, share = await self._parts.incoming.read(self._context, self._expected, patience_s=patience_s)
        except GaveWay:
            if sequence > 1:
                return False
            raise
        if message is None:
            return False
        self._shares.add(share)
        await self._take(message, share, sequence)
        return True

    async def _allowed(self) -> None:
        budget = self._parts.budget
        while self._held >= WINDOW:
            await self._change()
        if self._held and not budget.has_room:
            await budget.until(lambda: budget.has_room or not self._held)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _take(self, message: bytes, share: Share, sequence: int) -> None:
        size = len(message)
        self._parts.budget.take(size)
        self._held_bytes += size
        self._held += 1
        self._parts.metrics.received("PushGroups", size)
        bundle = parsed("PushGroupsRequest", split_push, message)
        pusher = caller()
        pusher.check_live()
        pusher.check_run(bundle.run.run_id)
        convert.check_bundle(bundle, sequence)
        entries: list[Entry] = []
        for body in bundle.groups:
            if len(entries) % ops.PORTION == ops.PORTION - 1:
                # A bundle of small groups takes 10 ms: pulls and other streams have their turn in between.
                await asyncio.sleep(0)
            entries.append(convert.entry(body, self._parts.limits))
        self._parts.metrics.direct("PushGroups", convert.direct_bytes(entries))
        run_id, seen = fields.run_ref(bundle.run)
        self._read.append(_Bundle(run_id, seen, sequence, size, entries, share))
        self._changed.set()

    # ── pushing ──────────────────────────────────────────────────────────────

    async def _push_all(self) -> None:
        while bundles := await self._next_bundles():
            for response in await self._push(bundles):
                await self._context.write(response.SerializeToString())
            self._release(bundles)
        if self._end is not None:
            raise self._end

    def _release(self, bundles: list[_Bundle]) -> None:
        size = sum([bundle.size_bytes for bundle in bundles])
        self._held -= len(bundles)
        self._held_bytes -= size
        self._shares.difference_update(bundle.share for bundle in bundles)
        self._parts.budget.give(size)
        self._changed.set()

    async def _next_bundles(self) -> list[_Bundle]:
        """Bundles that were read and may go into one call; empty at the end of the stream."""
        while not self._read and not self._ended:
            await self._change()
        bundles: list[_Bundle] = []
        size = 0
        while self._read and (not bundles or self._read[0].run_id == bundles[0].run_id):
            size += self._read[0].size_bytes
            if bundles and size > MERGED_BYTES:
                break
            bundles.append(self._read.popleft())
        return bundles

    async def _push(self, bundles: list[_Bundle]) -> list[pb.PushGroupsResponse]:
        def stored() -> None:
            for bundle in bundles:
                bundle.share.close()

        entries = [entry for bundle in bundles for entry in bundle.entries]
        seen = max(bundle.seen for bundle in bundles)
        revision, published = await push_entries(self._parts, bundles[0].run_id, entries, seen, stored)
        # Where nothing was valid the store was not asked.
        stored()
        return [
            convert.to_push_response(revision, bundle.sequence, list(map(convert.to_ack, bundle.entries)), published)
            for bundle in bundles
        ]


async def push_entries(
    parts: PushParts, run_id: str, entries: list[Entry], seen: Revision, stored: Callable[[], None]
) -> tuple[Revision, ops.WeightVersion]:
    """Push the groups among `entries`, which have their outcomes then, and no bodies; revision, published weights.

    `stored` is called once the bodies are in the store.
    """
    groups = [entry for entry in entries if isinstance(entry, ops.NewGroup)]
    if groups:
        try:
            revision, published = await parts.pushes.push(run_id, groups, seen, stored)
        finally:
            # An error remembers the frames that it came through, and they these groups.
            for group in groups:
                group.body = b""
    else:
        view = await parts.store.call(commands.weights(run_id))
        revision, published = view.revision, view.published
    parts.metrics.pushed([group.outcome for group in groups if group.outcome is not None])
    return revision, published
