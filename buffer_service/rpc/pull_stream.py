"""One pull: waits for the batch, then streams the shard in messages of about 1 MiB, reading ahead of the sending.

A body that is gone is reported lost, which makes the stored batch smaller: before the first message the pull is
simply repeated; after it the batch's facts are on their way, so the client is told to repeat it.
"""

import asyncio
from collections.abc import Iterator, Sequence

import grpc.aio

from buffer_service.domain import ops
from buffer_service.domain.policy import RunPolicy
from buffer_service.domain.ports import RunStore, Topic
from buffer_service.observability.diagnosis import Standing, pull_waits_on
from buffer_service.observability.metrics import RpcMetrics
from buffer_service.rpc.convert import batches as convert
from buffer_service.rpc.convert import fields
from buffer_service.rpc.waiting import Lines
from buffer_wire.codec import Delivered, join_pull
from buffer_wire.errors import BatchNotReady, NotReady, StoreFault
from buffer_wire.revision import Revision
from rollout_buffer.v1 import batches_pb2 as pb

MESSAGE_BYTES = 1 << 20
READ_BYTES = 4 << 20
"""One read of the store; two are held at once."""
MAX_READ_GROUPS = 1_024
TYPICAL_TOKEN_BYTES = 10
"""Of the three fixed columns, for the first guess of how many groups make a read."""

RawContext = grpc.aio.ServicerContext[bytes, bytes]


class PullStream:
    """Serves one PullBatch RPC."""

    def __init__(self, store: RunStore, lines: Lines, metrics: RpcMetrics) -> None:
        self._store = store
        self._lines = lines
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
            if await self._send(run_id, pull.epoch, batch, int((loop.time() - started) * 1000), context, reported):
                return

    async def _assembled(self, run_id: str, pull: ops.Pull, seen: Revision, wait_s: float) -> ops.Batch:
        with self._metrics.pulling(run_id) as wait:

            async def attempt() -> ops.Batch | ops.Short:
                result = await self._store.pull(run_id, pull, seen_revision=seen)
                if isinstance(result, ops.Short):
                    wait()
                return result

            result = await self._lines.until(
                run_id, Topic.GROUPS, attempt, lambda result: isinstance(result, ops.Batch), wait_s
            )
        if isinstance(result, ops.Batch):
            return result
        view = await self._store.view(run_id)
        raise BatchNotReady(
            step=result.step,
            queued_groups=result.queued,
            needed_groups=result.needed,
            leased=result.leased,
            pending=result.pending,
            waits_on=pull_waits_on(Standing.of(view), result.blocked_hint) + _of_round(view.policy, pull, result),
        )

    async def _send(
        self, run_id: str, epoch: int, batch: ops.Batch, waited_ms: int, context: RawContext, reported: set[str]
    ) -> bool:
        """Stream the shard; False when it has to be pulled again and nothing was sent: groups were `reported` lost."""
        chunks = _Chunks(batch)
        async with asyncio.TaskGroup() as tasks:
            keys = chunks.next_keys()
            ahead = tasks.create_task(self._store.fetch(run_id, keys))
            opened = False
            while True:
                found = await self._settle_lost(run_id, epoch, batch, chunks.groups(keys), await ahead, reported)
                if found is None:
                    if not opened:
                        return False
                    raise NotReady(f"groups of step {batch.step} are gone from the store; pull the step again")
                if not opened:
                    first = pb.PullBatchResponse(
                        revision=batch.revision,
                        revision_proof=batch.revision.proof,
                        batch=convert.to_batch_info(batch, waited_ms),
                    )
                    await context.write(first.SerializeToString())
                    opened = True
                chunks.advance(found)
                keys = chunks.next_keys()
                if keys:
                    ahead = tasks.create_task(self._store.fetch(run_id, keys))
                for message in _messages(batch.revision, found):
                    self._metrics.sent("PullBatch", len(message))
                    await context.write(message)
                if not keys:
                    return True

    async def _settle_lost(
        self,
        run_id: str,
        epoch: int,
        batch: ops.Batch,
        groups: Sequence[ops.ShardGroup],
        bodies: Sequence[ops.Buffer | None],
        reported: set[str],
    ) -> list[Delivered] | None:
        """The groups with their bodies, or None after those without one were reported lost."""
        lost = [group.payload_key for group, body in zip(groups, bodies, strict=True) if body is None]
        if lost:
            await self._store.report_lost(run_id, epoch, batch.step, lost)
            reported.update(lost)
            return None
        return [
            Delivered(body, group.sequence, group.head_version, group.tail_version)
            for group, body in zip(groups, bodies, strict=True)
            if body is not None
        ]


def _of_round(policy: RunPolicy, pull: ops.Pull, short: ops.Short) -> str:
    if not policy.micro_batch_groups and not pull.round:
        return ""
    return f"; round {pull.round} of step {short.step} needs {short.needed} groups"


class _Chunks:
    """Which groups to read next, so that a read is about READ_BYTES: sizes are learned from what was read."""

    def __init__(self, batch: ops.Batch) -> None:
        self._shard = batch.shard
        self._done = 0
        tokens = batch.shard_tokens // max(1, len(batch.shard))
        self._group_bytes = max(1, tokens * TYPICAL_TOKEN_BYTES)

    def next_keys(self) -> list[str]:
        """Payload keys of the next chunk; empty at the end."""
        count = min(MAX_READ_GROUPS, max(1, READ_BYTES // self._group_bytes))
        return [group.payload_key for group in self._shard[self._done : self._done + count]]

    def groups(self, keys: Sequence[str]) -> Sequence[ops.ShardGroup]:
        """The groups of the chunk with these keys, the present one."""
        return self._shard[self._done : self._done + len(keys)]

    def advance(self, found: Sequence[Delivered]) -> None:
        """The present chunk was read."""
        self._done += len(found)
        if found:
            self._group_bytes = max(1, sum(len(group.body) for group in found) // len(found))


def _messages(revision: Revision, groups: Sequence[Delivered]) -> Iterator[bytes]:
    """The groups as messages of at most MESSAGE_BYTES, unless a single group is larger."""
    part: list[Delivered] = []
    size = 0
    for group in groups:
        if part and size + len(group.body) > MESSAGE_BYTES:
            yield join_pull(revision, part)
            part, size = [], 0
        part.append(group)
        size += len(group.body)
    if part:
        yield join_pull(revision, part)
