"""The RPCs of groups, which are handed bytes and hand back bytes, so that no payload is parsed by protobuf."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import cast

from buffer_service.rpc.convert import fields, groups
from buffer_service.rpc.flow.budget import StreamSlots
from buffer_service.rpc.flow.room import WAIT_S, Expected, RawContext, Share
from buffer_service.rpc.messages import parsed
from buffer_service.rpc.streams.push import PushParts, PushStream, push_entries
from buffer_service.security.gate import caller
from buffer_wire.codec import split_push_one
from buffer_wire.errors import InvalidField
from buffer_wire.revision import Revision
from rollout_buffer.v1 import groups_pb2

_OF_DEADLINE = 0.8
"""Part of a unary push's time that may pass before its message is read."""


@dataclass(frozen=True, slots=True)
class GroupServicer:
    """Servicer of groups, which takes messages as bytes."""

    parts: PushParts
    slots: StreamSlots

    async def PushGroups(self, _requests: AsyncIterator[bytes], context: RawContext) -> None:
        """Push the bundles of a stream."""
        with self.slots.slot(caller().token_id):
            await PushStream(context, self.parts).run()

    async def PushGroup(self, _requests: AsyncIterator[bytes], context: RawContext) -> bytes:
        """Push one group, of a unary call that is read as a stream of one message: only when there is room for it."""
        expected = self.parts.incoming.expected()
        # Not at the price of reading it.
        self.parts.budget.refuse(expected.size)
        run_id, seen, entries, share = await self._read_one(context, expected)
        try:
            with share, self.parts.budget.held(share.size):
                revision, _published = await push_entries(self.parts, run_id, entries, seen, share.close)
            ack = groups.to_ack(entries[0])
        finally:
            # What goes wrong is remembered with this frame.
            entries.clear()
        return groups_pb2.PushGroupResponse(
            revision=revision, revision_proof=revision.proof, ack=ack
        ).SerializeToString()

    async def _read_one(
        self, context: RawContext, expected: Expected
    ) -> tuple[str, Revision, list[groups.Entry], Share]:
        """Run id, revision, the group and its room. The message is not kept: the push may wait in line for long."""
        left_s = cast("float | None", context.time_remaining())
        longest_s = WAIT_S if left_s is None else min(WAIT_S, left_s * _OF_DEADLINE)
        async with self.parts.drain.interruptible():
            message, share = await self.parts.incoming.read(context, expected, longest_s)
        try:
            return *self._entry(message), share
        except BaseException:
            share.close()
            raise

    def _entry(self, message: bytes | None) -> tuple[str, Revision, list[groups.Entry]]:
        if message is None:
            raise InvalidField("message", "none", "one PushGroupRequest")
        self.parts.metrics.received("PushGroup", len(message))
        bundle = parsed("PushGroupRequest", split_push_one, message)
        caller().check_run(bundle.run.run_id)
        run_id, seen = fields.run_ref(bundle.run)
        if not bundle.groups:
            raise InvalidField("group", "unset", "set")
        entries = [groups.entry(bundle.groups[0], self.parts.limits)]
        self.parts.metrics.direct("PushGroup", groups.direct_bytes(entries))
        return run_id, seen, entries
