"""Pull: waits for the batch, then streams the shard in messages of about 1 MiB.

It reads ahead of the sending while there is room. A body that is gone is reported lost, which makes the stored batch
smaller. Before the first message the pull is then simply repeated. After it the batch's facts are on their way, so the
client is told to repeat it.
"""

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Self, TypeAlias

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
from buffer_wire.codec import Delivered, join_pull
from buffer_wire.errors import BatchNotReady, NotReady, StoreFault
from buffer_wire.payloads.keys import size_of
from buffer_wire.revision import Revision
from rollout_buffer.v1 import batches_pb2 as pb

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

    def __init__(self, store: RunStore, lines: WaitingLines, room: Room, metrics: RpcMetrics) -> None:
        self._store = store
        self._lines = lines
        self._room = room
        self._metrics = metrics

    async def run(self, request: pb.PullBatchRequest, run_id: str, pull: ops.Pull, context: RawContext) -> None:
        """Raises BatchNotReady when the wait passes, and what the store raises."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        deadline = started + request.wait_ms / 1000
        reported: set[str] = set()
        while True:
            batch = await self._assembled(run_id, pull, fields.run_ref(request.run)[1], deadline - loop.time())
            if reported.intersection(group.payload_key for group in batch.shard):
                raise StoreFault(
                    f"groups of step {batch.step} are gone from the store, and it is trained: it cannot be pulled as "
                    "it was; resume at it to have them settled as lost"
                )
            if await self._send(run_id, pull.term, batch, int((loop.time() - started) * 1000), context, reported):
                return

    async def _assembled(self, run_id: str, pull: ops.Pull, seen: Revision, wait_s: float) -> ops.Batch:
        with self._metrics.pulling(run_id) as wait:

            async def attempt() -> ops.Batch | ops.Short:
                result = await self._store.call(commands.pull(run_id, pull, seen_revision=seen))
                if isinstance(result, ops.Short):
                    wait()
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
        self, run_id: str, term: int, batch: ops.Batch, waited_ms: int, context: RawContext, reported: set[str]
    ) -> bool:
        """Stream the shard; False when it has to be pulled again and nothing was sent: groups were `reported` lost."""
        opened = False
        async with _Reads(self._store, self._room, run_id, batch.shard) as reads:
            while True:
                groups, bodies, share = await reads.next()
                found = await self._settle_lost(run_id, term, batch, groups, bodies, reported)
                if found is None:
                    if not opened:
                        return False
                    raise NotReady(f"groups of step {batch.step} are gone from the store; pull the step again")
                # Each is let go as soon as it is in a message.
                bodies.clear()
                if not opened:
                    first = pb.PullBatchResponse(
                        revision=batch.revision,
                        revision_proof=batch.revision.proof,
                        batch=convert.to_batch_info(batch, waited_ms),
                    )
                    await context.write(first.SerializeToString())
                    opened = True
                reads.ahead()
                for message in _messages(batch.revision, found):
                    self._metrics.sent("PullBatch", len(message))
                    async with self._room.of_client(share):
                        await context.write(message)
                    share.resize(max(0, share.size - _COPIES * len(message)))
                share.close()
                if reads.done:
                    return True

    async def _settle_lost(
        self,
        run_id: str,
        term: int,
        batch: ops.Batch,
        groups: Sequence[ops.ShardGroup],
        bodies: Sequence[ops.Buffer | None],
        reported: set[str],
    ) -> deque[Delivered] | None:
        """The groups with their bodies, or None after those without one were reported lost."""
        lost = [group.payload_key for group, body in zip(groups, bodies, strict=True) if body is None]
        if lost:
            await self._store.call(commands.report_lost(run_id, term, batch.step, lost))
            reported.update(lost)
            return None
        return deque(
            Delivered(body, group.sequence, group.head_version, group.tail_version)
            for group, body in zip(groups, bodies, strict=True)
            if body is not None
        )


def _of_micro_batch(policy: RunPolicy, pull: ops.Pull, short: ops.Short) -> str:
    if not policy.micro_batch_groups and not pull.micro_batch:
        return ""
    return f"; micro-batch {pull.micro_batch} of step {short.step} needs {short.needed} groups"


_Read: TypeAlias = "tuple[list[ops.ShardGroup], Share, asyncio.Future[Sequence[ops.Buffer | None]]]"


class _Reads:
    """The shard's groups with their bodies, in reads of about READ_BYTES, less while many pull."""

    def __init__(self, store: RunStore, room: Room, run_id: str, shard: Sequence[ops.ShardGroup]) -> None:
        self._store = store
        self._room = room
        self._run_id = run_id
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
        bodies = list(await fetch)
        self._ahead = None
        return groups, bodies, share

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
        keys = [group.payload_key for group in groups]
        return groups, share, asyncio.ensure_future(self._store.fetch(self._run_id, keys))

    def _following(self) -> tuple[list[ops.ShardGroup], int]:
        """Groups of the next read, and the room that they need."""
        most = min(READ_BYTES, self._room.free_bytes // _PART_OF_FREE)
        groups: list[ops.ShardGroup] = []
        size = 0
        while self._left and len(groups) < MAX_READ_GROUPS:
            group_bytes = size_of(self._left[0].payload_key)
            if groups and size + group_bytes > most:
                break
            groups.append(self._left.popleft())
            size += group_bytes
        return groups, _COPIES * size


def _messages(revision: Revision, groups: deque[Delivered]) -> Iterator[bytes]:
    """The groups, which are taken out, as messages of at most MESSAGE_BYTES, unless a single group is larger."""
    while groups:
        part = [groups.popleft()]
        size = len(part[0].body)
        while groups and size + len(groups[0].body) <= MESSAGE_BYTES:
            size += len(groups[0].body)
            part.append(groups.popleft())
        message = join_pull(revision, part)
        part.clear()
        yield message
