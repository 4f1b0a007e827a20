"""The buffer: the worker's own pusher, the trainer's own client. Groups have no leases, as no other side has any."""

import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np
import uvloop

from bench.peers.groups import PROMPT, Columns, Size
from bench.peers.loops import BATCH, FULL_S, Source
from bench.peers.loops import Group as Pushed
from buffer_wire import layout
from buffer_wire.payloads.writer import PayloadWriter
from rollout_buffer.v1 import groups_pb2 as pb
from rollout_workers.counters import Counters
from rollout_workers.service.client import ServiceClient
from rollout_workers.service.pusher import Pusher
from trainer_client import BufferClient, Group
from trainer_client.policy import Policy

_QUEUED = 4_096
_COLUMNS = [
    pb.Column(name=name, dtype=dtype, axis=pb.AXIS_TOKEN)  # type: ignore[arg-type]
    for name, dtype in layout.REQUIRED_COLUMNS
]


class Producer:
    """A worker's pusher in an event loop as the worker has it; every group is a task, as with the worker's slots."""

    def __init__(self, queue: str, address: dict[str, str], size: Size) -> None:
        del size
        self._loop = uvloop.new_event_loop()
        self._loop.run_until_complete(self._open(queue, address["service"]))

    async def _open(self, run_id: str, address: str) -> None:
        self._client = ServiceClient(address, run_id, instance_id="bench", timeout_s=60.0)
        self._counters = Counters()
        self._writer = PayloadWriter(run_id, "bench", partial(self._client.write_access, "bench"))
        self._pusher = Pusher(self._client, self._counters, self._writer)
        self._running = asyncio.create_task(self._pusher.run())

    def push(self, group: Pushed) -> None:
        """Push a group; returns once it is queued."""
        self._loop.run_until_complete(self._push(group))

    def flow(self, source: Source) -> None:
        """Push every group that the source gives as soon as it gives it."""
        self._loop.run_until_complete(self._flow(source))

    def facts(self) -> dict[str, float]:
        """Part of the pushed bytes that went directly."""
        moved = self._counters.pushed_bytes
        return {"direct": moved["direct"] / max(1, moved.total())}

    def close(self) -> None:
        """Close the stream and the connections."""
        self._loop.run_until_complete(self._close())
        self._loop.close()

    async def _flow(self, source: Source) -> None:
        async with asyncio.TaskGroup() as tasks:
            while not source.is_over:
                groups = source.take()
                for group in groups:
                    tasks.create_task(self._push(group))
                # One after another, as a worker's groups are done.
                await asyncio.sleep(0 if groups else FULL_S)

    async def _push(self, group: Pushed) -> None:
        result = await self._pusher.push(self._header(group), _payload(group))
        if result.outcome != "queued":
            raise RuntimeError(f"group {group[0]} was answered {result}")

    def _header(self, group: Pushed) -> pb.GroupHeader:
        uid, samples = group
        header = pb.GroupHeader(task_id=str(uid), environment="bench", columns=_COLUMNS, worker_id="bench")
        for sample in samples:
            made = header.samples.add()
            made.tokens = len(sample.tokens)
            made.prompt_len = PROMPT
            made.loss_tokens = int(np.count_nonzero(sample.mask))
            made.reward = sample.reward
            made.finish_reason = pb.FINISH_REASON_STOP
            span = made.spans.add()
            span.start, span.end = PROMPT, len(sample.tokens)
            span.version.term = 1
        return header

    async def _close(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self._writer.close()
        await self._client.close()


def _payload(group: Pushed) -> Sequence[layout.Buffer]:
    """The columns, sample after sample, as a worker's groups become pieces."""
    samples = group[1]
    columns = [[s.tokens for s in samples], [s.logprobs for s in samples], [s.mask for s in samples]]
    return layout.payload_pieces(columns)


class Consumer:
    """A trainer: pulls a step, reads it; the next pull first commits and checkpoints it, which frees the groups."""

    def __init__(self, queue: str, address: dict[str, str], size: Size) -> None:
        del size
        self._run_id = queue
        self._client = BufferClient(address["service"])
        self._client.create_run(queue, Policy(batch_groups=BATCH, max_queued_groups=_QUEUED, overflow_action="block"))
        self._term = self._client.resume(queue, next_step=0).term
        self._step = 0
        self._bytes = self._direct_bytes = 0

    def pull(self, count: int) -> Sequence[Columns]:
        """Finish the step before and pull the next, of so many groups, in one call."""
        done = self._step - 1 if self._step else None
        batch = self._client.pull(
            self._run_id,
            term=self._term,
            step=self._step,
            batch_groups=count,
            commit_through=done,
            checkpoint_through=done,
            timeout_s=60.0,
        )
        self._step += 1
        for group in batch.groups:
            self._bytes += len(group.payload)
            self._direct_bytes += 0 if isinstance(group.payload.obj, bytes) else len(group.payload)
        return [_columns(group) for group in batch.groups]

    def facts(self) -> dict[str, float]:
        """Part of the pulled bytes that came directly: what was relayed lies in a message of gRPC."""
        return {"direct": self._direct_bytes / max(1, self._bytes)}

    def close(self) -> None:
        """Finish the last step, and delete the run."""
        self._finish()
        if not self._client.ledger(self._run_id).balanced:
            raise RuntimeError("the ledgers do not balance")
        self._client.delete_run(self._run_id)
        self._client.close()

    def _finish(self) -> None:
        if self._step:
            done = {"term": self._term, "through_step": self._step - 1}
            self._client.commit(self._run_id, **done)
            self._client.checkpoint(self._run_id, **done)


def _columns(group: Group) -> Columns:
    columns = group.columns
    return Columns(
        int(group.task_id),
        columns[layout.TOKEN_IDS],
        columns[layout.LOGPROBS],
        columns[layout.LOSS_MASK],
        group.rewards,
    )
