"""Payloads in parts that clients send and fetch through the service, since they cannot reach the store.

Each message is a part. One is in the store before the next is read, or with gRPC before the next is fetched. So a
stream holds a part at most, in room that it takes as pushes and pulls do. What is written is as if its pusher had
written it: it expires until a push names it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.ports import RunStore
from buffer_service.observability.metrics import RpcMetrics
from buffer_service.rpc.convert import fields
from buffer_service.rpc.convert.groups import Limits
from buffer_service.rpc.flow.budget import ByteBudget
from buffer_service.rpc.flow.drain import Drain
from buffer_service.rpc.flow.room import Expected, Incoming, RawContext, Room, Share
from buffer_service.rpc.messages import parsed
from buffer_service.security.gate import caller
from buffer_wire.codec import WrittenPart, join_read_part, split_written_part
from buffer_wire.errors import InvalidField, NotReady
from buffer_wire.payloads.keys import PART_BYTES, Part, is_key_of, part_keys, parts_of, size_of
from rollout_buffer.v1 import payloads_pb2 as pb

PART_S = 60.0
"""Longest wait for a part, in seconds: who sends none keeps bytes of blocked_bytes from those who push."""

_COPIES = 2
"""Copies of a part that goes out: the message made of it, and gRPC's of that."""


@dataclass(frozen=True, slots=True)
class PartStreams:
    """Streams of one process that write payloads in parts, and that read them."""

    store: RunStore
    incoming: Incoming
    outgoing: Room
    budget: ByteBudget
    drain: Drain
    metrics: RpcMetrics
    limits: Limits

    async def write(self, context: RawContext) -> int:
        """Write the payload of one stream; its size in bytes.

        Raises InvalidField, UnknownRun, NotReady, and what the store raises.
        """
        # What lies there and is not pushed is as much as pushes that wait to be acknowledged.
        await self.budget.until(lambda: self.budget.has_room)
        expected = Expected(PART_BYTES, 1)
        size = 0
        try:
            first, share = await self._read(context, expected)
            with share:
                run_id, parts = self._named(first)
                size = sum(part.size for part in parts)
                self.budget.take(size)
                await self._check_fits(run_id, size)
                await self._write_part(parts, 0, first)
            del first
            for index in range(1, len(parts)):
                caller().check_live()
                message, share = await self._read(context, expected)
                with share:
                    await self._write_part(parts, index, message)
                del message
        finally:
            self.budget.give(size)
        return size

    async def read(self, request: pb.ReadPayloadRequest, context: RawContext) -> None:
        """Send the parts of a payload. Raises InvalidField, and NotReady for one of which a part is gone."""
        for part in part_keys(_key(fields.run_id(request.run.run_id), request.payload_key, in_parts=False)):
            caller().check_live()
            with await self.outgoing.take(_COPIES * part.size) as share:
                body = await self.store.read_part(part.key)
                if body is None or len(body) != part.size:
                    raise NotReady(f"{part.key} is not there, or not {part.size} bytes; pull the step again")
                message = join_read_part(body)
                del body
                self.metrics.sent("ReadPayload", len(message))
                async with self.outgoing.of_client(share):
                    await context.write(message)
                del message

    async def _read(self, context: RawContext, expected: Expected) -> tuple[WrittenPart, Share]:
        async with self.drain.interruptible():
            wait = asyncio.timeout(PART_S)
            try:
                async with wait:
                    message, share = await self.incoming.read(context, expected)
            except TimeoutError:
                if not wait.expired():
                    raise
                raise NotReady(f"no part came for {PART_S:.0f} s; write the payload under a new key") from None
        if message is None:
            raise InvalidField("part", "none", "as many parts as payload_key says, a message each")
        self.metrics.received("WritePayload", len(message))
        try:
            return parsed("WritePayloadRequest", split_written_part, message), share
        except BaseException:
            share.close()
            raise

    def _named(self, first: WrittenPart) -> tuple[str, Sequence[Part]]:
        """Run and parts that the first message names."""
        caller().check_run(first.run.run_id)
        run_id, _ = fields.run_ref(first.run)
        key = _key(run_id, first.payload_key)
        self.limits.check(size_of(key), parts_of(key), ops.TaskSink.QUEUE)
        return run_id, part_keys(key)

    async def _check_fits(self, run_id: str, size: int) -> None:
        """Refuse what no push could name: for an unknown run, or above a bound of the policy."""
        policy = (await self.store.call(commands.view(run_id))).policy
        for name in ("max_queued_bytes", "quota_bytes"):
            most = getattr(policy, name)
            if most and size > most:
                raise InvalidField("payload", f"{size} bytes", f"at most {most} bytes, the run's {name}")

    async def _write_part(self, parts: Sequence[Part], index: int, message: WrittenPart) -> None:
        part = parts[index]
        if len(message.part) != part.size:
            raise InvalidField("part", f"{len(message.part)} bytes", f"{part.size} bytes, part {index} of {len(parts)}")
        if not await self.store.write_part(part.key, message.part):
            raise InvalidField("payload_key", part.key, "a new nonce: there is such a part")


def _key(run_id: str, key: str, *, in_parts: bool = True) -> str:
    """The key, of a payload of the run, which has to lie `in_parts`. Raises InvalidField."""
    if not is_key_of(run_id, key) or (in_parts and not parts_of(key)):
        raise InvalidField("payload_key", key, f"the key of a payload of run {run_id}" + " in parts" * in_parts)
    return key
