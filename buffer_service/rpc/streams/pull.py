"""Pull: waits for the batch, then streams the shard in messages of about 1 MiB.

It reads ahead of the sending while there is room. A body that is gone is reported lost, which makes the stored batch
smaller; so is one that is not what its key says: a client may have written anything. Before the first message the pull
is then simply repeated. After it the batch's facts are on their way, so the client is told to repeat it.

Large groups of a client that reads from the store itself are sent as their keys. They are not read here, take no room,
and stand in the stream where they stand in the step. Groups larger than a message are sent as keys to whoever reads
parts. Those of a client that does not read from the store are checked first, part by part.

A commit and a checkpoint that come with the pull are done first, in this order: what is refused ends the call.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Self, TypeAlias

import structlog

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.policy import RunPolicy
from buffer_service.domain.ports import RunStore, Topic
from buffer_service.observability.diagnosis import Situation, pull_waits_on
from buffer_service.observability.metrics import RpcMetrics
from buffer_service.rpc.convert import batches as convert
from buffer_service.rpc.convert import fields
from buffer_service.rpc.flow.room import RawContext, Room, Share
from buffer_service.rpc.flow.waiting import WaitingLines
from buffer_service.rpc.tracing import ServiceTraces
from buffer_wire.codec import Delivered, join_pull
from buffer_wire.errors import BatchNotReady, InvalidField, NotReady, StoreFault
from buffer_wire.limits import MAX_HEADER_BYTES
from buffer_wire.payloads.keys import is_of, part_keys, parts_of, size_of
from buffer_wire.payloads.parts import PartsCheck
from buffer_wire.revision import Revision
from rollout_buffer.v1 import batches_pb2 as pb

log = structlog.get_logger(__name__)

MESSAGE_BYTES = 1 << 20
READ_BYTES = 4 << 20
"""Largest size in bytes of one read of the store. Two reads are held at once, unless many pull."""
MAX_READ_GROUPS = 1_024
_PART_OF_FREE = 16
"""A read takes a part of the room that is free, so that slow readers leave some for those who come after them."""
_COPIES = 2
"""Copies of what is read: the body or the message made of it, and gRPC's copy of that."""


class PullStream:
    """Serves one PullBatch RPC."""

    def __init__(
        self,
        store: RunStore,
        lines: WaitingLines,
        room: Room,
        metrics: RpcMetrics,
        direct_from_bytes: int,
        message_bytes: int,
        traces: ServiceTraces | None = None,
    ) -> None:
        self._traces = traces
        self._store = store
        self._lines = lines
        self._room = room
        self._metrics = metrics
        self._direct_from_bytes = direct_from_bytes
        self._most_bytes = message_bytes + MAX_HEADER_BYTES
        """Largest group that a message carries."""

    async def run(self, request: pb.PullBatchRequest, run_id: str, pull: ops.Pull, context: RawContext) -> None:
        """Raises BatchNotReady when the wait passes, and what the store raises."""
        seen = fields.run_ref(request.run)[1]
        progress = await self._progress(run_id, request, seen)
        loop = asyncio.get_running_loop()
        started = loop.time()
        deadline = started + request.wait_ms / 1000
        reported: set[str] = set()
        while True:
            batch = await self._assembled(run_id, pull, seen, deadline - loop.time())
            assembled_ns = time.time_ns()
            if reported.intersection(piece.payload_key for piece in batch.pieces):
                raise StoreFault(
                    f"groups of step {batch.step} are gone from the store, and it is trained: it cannot be pulled as "
                    "it was; resume at it to have them settled as lost"
                )
            info = convert.to_batch_info(batch, int((loop.time() - started) * 1000), *progress)
            if await self._send(run_id, request, batch, info, context, reported):
                if self._traces is not None:
                    await self._traces.pulled(run_id, batch, assembled_ns)
                return

    async def _progress(self, run_id: str, request: pb.PullBatchRequest, seen: Revision) -> tuple[int, int]:
        """Commit and checkpoint what the request names; the replies' numbers of steps, 0 for what it does not name."""
        term, committing, through = request.term, request.commit_through_step, request.checkpoint_through_step
        commits, checkpoints = request.HasField("commit_through_step"), request.HasField("checkpoint_through_step")
        call = self._store.call
        if commits and checkpoints:
            return await call(commands.commit_and_checkpoint(run_id, term, committing, through, seen_revision=seen))
        if commits:
            return (await call(commands.commit(run_id, term, committing, seen_revision=seen)))[1], 0
        if checkpoints:
            return 0, (await call(commands.checkpoint(run_id, term, through, seen_revision=seen)))[1]
        return 0, 0

    async def _assembled(self, run_id: str, pull: ops.Pull, seen: Revision, wait_s: float) -> ops.Batch:
        with self._metrics.pulling(run_id) as wait:

            async def attempt() -> ops.Batch | ops.Short:
                result = await self._store.call(commands.pull(run_id, pull, seen_revision=seen))
                if isinstance(result, ops.Short):
                    wait()
                    self._lines.lacks(run_id, result.needed - result.queued)
                return result

            result = await self._lines.until(
                run_id, Topic.GROUPS, attempt, lambda result: isinstance(result, ops.Batch), wait_s
            )
        if isinstance(result, ops.Batch):
            return result
        view = await self._store.call(commands.view(run_id))
        raise BatchNotReady(
            step=result.step,
            queued_groups=result.queued,
            needed_groups=result.needed,
            leased=result.leased,
            pending=result.pending,
            waits_on=pull_waits_on(Situation.of(view), result.blocked_hint)
            + _of_micro_batch(view.policy, pull, result),
        )

    async def _send(
        self,
        run_id: str,
        request: pb.PullBatchRequest,
        batch: ops.Batch,
        info: pb.BatchInfo,
        context: RawContext,
        reported: set[str],
    ) -> bool:
        """Stream the shard; False when it has to be pulled again and nothing was sent: groups were `reported` lost."""
        opened = False
        pieces = batch.pieces
        _check_stages(request, pieces)
        by_key = frozenset(piece.payload_key for piece in pieces if self._goes_by_key(request, piece))
        if by_key and not request.direct and not await self._are_whole(run_id, request, batch, by_key, reported):
            return False
        async with _Reads(self._store, self._room, run_id, pieces, by_key) as reads:
            while True:
                groups, bodies, share = await reads.next()
                found = await self._settle_lost(run_id, request, batch, groups, bodies, reported)
                if found is None:
                    if not opened:
                        return False
                    raise NotReady(f"groups of step {batch.step} are gone from the store; pull the step again")
                # Each is let go as soon as it is in a message.
                bodies.clear()
                facts = b"" if opened else _facts(batch.revision, info)
                opened = True
                reads.ahead()
                if request.direct:
                    self._metrics.direct("PullBatch", sum(size_of(one.payload_key) for one in found if one.payload_key))
                for message in _messages(facts, batch.revision, found):
                    self._metrics.sent("PullBatch", len(message))
                    async with self._room.of_client(share):
                        await context.write(message)
                    share.resize(max(0, share.size - _COPIES * len(message)))
                share.close()
                if reads.done:
                    return True

    def _goes_by_key(self, request: pb.PullBatchRequest, group: ops.ShardGroup) -> bool:
        """True where the group is sent as its key. Raises InvalidField where it can be sent in no way."""
        size, in_parts = size_of(group.payload_key), parts_of(group.payload_key) > 0
        if request.direct and size >= self._direct_from_bytes and (request.reads_parts or not in_parts):
            return True
        if size <= self._most_bytes:
            return False
        if not request.reads_parts or not in_parts:
            raise InvalidField(
                "reads_parts",
                "false",
                f"true: group {group.group_id} has {size} bytes, and a message at most {self._most_bytes}",
            )
        return True

    async def _are_whole(
        self, run_id: str, request: pb.PullBatchRequest, batch: ops.Batch, keys: Iterable[str], reported: set[str]
    ) -> bool:
        """Check groups that the client is to read by ReadPayload; False after those that are not whole were `reported`
        lost.
        """
        gone, damaged = [], []
        for key in keys:
            check = PartsCheck(key)
            for part in part_keys(key):
                with await self._room.take(part.size):
                    body = await self._store.read_part(part.key)
                    if body is None:
                        gone.append(key)
                        break
                    check.see(body)
                    del body
            else:
                if not check.is_good:
                    damaged.append(key)
        return not await self._reported_lost(run_id, request, batch, gone, damaged, reported)

    async def _settle_lost(
        self,
        run_id: str,
        request: pb.PullBatchRequest,
        batch: ops.Batch,
        groups: Sequence[ops.ShardGroup],
        bodies: Sequence[ops.Buffer | None],
        reported: set[str],
    ) -> deque[Delivered] | None:
        """The groups with their bodies, or None after those without one, or with a damaged one, were reported lost."""
        gone, damaged, found = [], [], deque[Delivered]()
        for group, body in zip(groups, bodies, strict=True):
            if body is None:
                gone.append(group.payload_key)
            elif body is not _BY_KEY and not is_of(group.payload_key, body):
                damaged.append(group.payload_key)
            else:
                key = group.payload_key if body is _BY_KEY else ""
                versions = group.head_version, group.tail_version
                found.append(Delivered(body, group.sequence, *versions, key, group.stage, group.prior_uses))
        return None if await self._reported_lost(run_id, request, batch, gone, damaged, reported) else found

    async def _reported_lost(
        self,
        run_id: str,
        request: pb.PullBatchRequest,
        batch: ops.Batch,
        gone: Sequence[str],
        damaged: Sequence[str],
        reported: set[str],
    ) -> bool:
        """Report payloads lost; False where there are none."""
        if not gone and not damaged:
            return False
        log.warning("payloads lost", run=run_id, step=batch.step, gone=gone, damaged=damaged)
        self._metrics.lost(gone=len(gone), damaged=len(damaged))
        await self._store.call(commands.report_lost(run_id, request.term, batch.step, [*gone, *damaged]))
        reported.update(gone, damaged)
        return True


def _check_stages(request: pb.PullBatchRequest, pieces: Sequence[ops.ShardGroup]) -> None:
    """Refuse columns of stages to a client that would take them for groups. Raises InvalidField."""
    added = next((piece for piece in pieces if piece.stage), None)
    if added is not None and not request.reads_stages:
        limit = (
            f"true: stage {added.stage} has added columns to group {added.group_id}, which clients of 0.1.0 do not know"
        )
        raise InvalidField("reads_stages", "false", limit)


def _of_micro_batch(policy: RunPolicy, pull: ops.Pull, short: ops.Short) -> str:
    if not policy.micro_batch_groups and not pull.micro_batch:
        return ""
    return f"; micro-batch {pull.micro_batch} of step {short.step} needs {short.needed} groups"


_BY_KEY: Final = memoryview(b"")
"""Stand-in for the body of a group that goes as its key."""

_Read: TypeAlias = "tuple[list[ops.ShardGroup], Share, asyncio.Future[Sequence[ops.Buffer | None]]]"


class _Reads:
    """The shard's groups with their bodies, in reads of about READ_BYTES, less while many pull.

    Those that go `by_key` are not read.
    """

    def __init__(
        self, store: RunStore, room: Room, run_id: str, shard: Sequence[ops.ShardGroup], by_key: frozenset[str]
    ) -> None:
        self._store = store
        self._room = room
        self._run_id = run_id
        self._by_key = by_key
        self._left = deque(shard)
        self._shares: list[Share] = []
        self._ahead: _Read | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._ahead is not None:
            fetch = self._ahead[2]
            fetch.cancel()
            await asyncio.gather(fetch, return_exceptions=True)
        for share in self._shares:
            share.close()

    @property
    def done(self) -> bool:
        """True when the last read was given."""
        return not self._left and self._ahead is None

    async def next(self) -> tuple[list[ops.ShardGroup], list[ops.Buffer | None], Share]:
        """Groups, bodies and the room that they take, once there is room."""
        if self._ahead is None:
            following, size = self._following()
            self._ahead = self._begin(following, await self._room.take(size) if size else Share(self._room, 0))
        groups, share, fetch = self._ahead
        found = iter(await fetch)
        self._ahead = None
        return groups, [_BY_KEY if group.payload_key in self._by_key else next(found) for group in groups], share

    def ahead(self) -> None:
        """Begin the next read, where there is room to spare."""
        groups, size = self._following()
        share = self._room.take_spare(size) if groups else None
        if share is None:
            self._left.extendleft(reversed(groups))
        else:
            self._ahead = self._begin(groups, share)

    def _begin(self, groups: list[ops.ShardGroup], share: Share) -> "_Read":
        self._shares = [held for held in self._shares if held.size]
        self._shares.append(share)
        keys = [group.payload_key for group in groups if group.payload_key not in self._by_key]
        return groups, share, asyncio.ensure_future(self._store.fetch(self._run_id, keys))

    def _following(self) -> tuple[list[ops.ShardGroup], int]:
        """Groups of the next read, and the room that they need."""
        most = min(READ_BYTES, self._room.free_bytes // _PART_OF_FREE)
        groups: list[ops.ShardGroup] = []
        size = 0
        while self._left and len(groups) < MAX_READ_GROUPS:
            key = self._left[0].payload_key
            group_bytes = 0 if key in self._by_key else size_of(key)
            if groups and size + group_bytes > most:
                break
            groups.append(self._left.popleft())
            size += group_bytes
        return groups, _COPIES * size


def _facts(revision: Revision, info: pb.BatchInfo) -> bytes:
    return pb.PullBatchResponse(revision=revision, revision_proof=revision.proof, batch=info).SerializeToString()


def _messages(facts: bytes, revision: Revision, groups: deque[Delivered]) -> Iterator[bytes]:
    """The groups, which are taken out, as messages of about MESSAGE_BYTES, unless a single group is larger.

    The facts are in the first one, or alone where that is large.
    """
    while groups:
        part = [groups.popleft()]
        size = _size_in_message(part[0])
        while groups and size + _size_in_message(groups[0]) <= MESSAGE_BYTES:
            size += _size_in_message(groups[0])
            part.append(groups.popleft())
        message = join_pull(revision, part)
        part.clear()
        if facts and len(message) <= MESSAGE_BYTES:
            # Two serialized messages, one after the other, are one that has the fields of both.
            message = facts + message
        elif facts:
            yield facts
        facts = b""
        yield message
    if facts:
        yield facts


def _size_in_message(group: Delivered) -> int:
    return len(group.body) + len(group.payload_key)
