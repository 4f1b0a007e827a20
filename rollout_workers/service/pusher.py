"""Carries finished groups to the service: one stream of bundles for the whole worker, one answer per group.

Invariants: a group leaves only with a final answer (queued, duplicate, closed, filtered, invalid, refused) or by
`withdraw`; after any failure of the stream everything unanswered is sent again, for pushes are idempotent; a push
without a lease carries the run's revision from before its first try, so that a repeat of it is never trained twice;
what waits and what is under way stays within `window_bytes` and `window_groups`. So a full queue at the service stops
the engines instead of filling this process's memory. No timer: a group leaves at once while fewer than
BUNDLES_UNDER_WAY bundles are unanswered. What comes meanwhile makes the next bundle.

With a `writer` a large group is written to the store first, beside others, and only its header is sent. Those that are
written together are pushed together: a bundle costs service and worker as much as several groups. The payload counts
all the same, in the window, for it is kept until the answer, and in the bundle, whose groups are answered together.
A group over 8 MiB that cannot be written so is sent to the service part by part, and pushed alike.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence

import grpc
import structlog

from buffer_wire.codec import Buffer, join_group, join_push, stored_group
from buffer_wire.connection.retry import Backoff
from buffer_wire.connection.stream_end import StreamEnd
from buffer_wire.errors import AccessRefused, InvalidField, RolloutBufferError
from buffer_wire.limits import MAX_GROUPS_PER_BUNDLE, MAX_HEADER_BYTES, MAX_MESSAGE_BYTES
from buffer_wire.payloads.keys import part_count
from buffer_wire.payloads.writer import PayloadWriter
from buffer_wire.status import from_detail
from rollout_buffer.v1 import groups_pb2
from rollout_workers.changes import Changes
from rollout_workers.counters import Counters
from rollout_workers.service.client import BACKOFF, PushStream, ServiceClient, on_whom, worth_waiting
from rollout_workers.service.parcels import Outbox, Parcel, PushResult

BUNDLES_UNDER_WAY = 2
"""Unanswered bundles beside which only full ones are sent: the service decides one while it receives the other."""

MAX_MISSES = 2
"""Payloads of one group that may be missing in the store; then it is relayed."""

_REJECTED = Backoff(first_s=0.2, ceiling_s=5.0)
_OUTCOMES = {number: name.removeprefix("PUSH_OUTCOME_").lower() for name, number in groups_pb2.PushOutcome.items()}
_log = structlog.get_logger()


class Pusher:
    """Push stream of one worker."""

    def __init__(
        self,
        service: ServiceClient,
        counters: Counters,
        writer: PayloadWriter | None = None,
        *,
        bundle_bytes: int = 4 << 20,
        window_bytes: int = 256 << 20,
        window_groups: int = 1_024,
    ) -> None:
        self._service = service
        self._counters = counters
        self._writer = writer
        self._bundle_bytes = bundle_bytes
        self._window_bytes = window_bytes
        self._window_groups = window_groups
        self._waiting = Outbox()
        self._sent: deque[tuple[int, list[Parcel]]] = deque()
        self._open: set[Parcel] = set()
        self._open_bytes = 0
        self._room = Changes()
        """Changes of what the window holds."""
        self._writing = 0
        """Groups that are being written."""
        self._sendable = asyncio.Event()
        """Set when something may be sent: one wake-up for all that came since the sender looked."""
        self._known_revision = 0
        """Revision of the run that was asked for, for groups without leases, since the beginning of the stream."""
        self._asking = asyncio.Lock()
        self._one_by_one = False
        """True after the service has refused a whole bundle: groups go one at a time, until the culprit is found."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def oldest_s(self) -> float:
        """Age of the oldest group without an answer, in seconds; 0 when there is none."""
        return max((time.monotonic() - parcel.since for parcel in self._open), default=0.0)

    async def push(self, header: groups_pb2.GroupHeader, payload: Buffer | Sequence[Buffer]) -> PushResult:
        """Send a group; returns the final answer. Waits for room in the window. Cancelling withdraws the group.

        `payload`: whole or in pieces, of bytes; they may not change before it returns.
        Raises RolloutBufferError where the service does not say what it has to know first: the run's revision, for a
        group without a lease, and the largest group, for a large one. And where it does not take a large one's parts.
        """
        pieces = [payload] if isinstance(payload, Buffer) else payload
        payload_bytes = sum(map(len, pieces))
        size = header.ByteSize() + payload_bytes + 32
        if part_count(size) and (refusal := await self._too_large(header, payload_bytes)):
            return self._settled("refused", refusal)
        if not self._has_room(size):
            await self._room.until(lambda: self._has_room(size))
        parcel = Parcel(header, pieces, size, asyncio.get_running_loop().create_future())
        self._open.add(parcel)
        self._open_bytes += size
        try:
            await self._make_ready(parcel)
            self._join(parcel)
            while (result := await parcel.answer) is None:
                await self._again_later(parcel)
            return result
        except InvalidField as error:
            # A part of it is refused for good.
            return self._settled("refused", error)
        finally:
            if self._close(parcel):
                self._room.notify()

    async def run(self) -> None:
        """Keep the stream up until cancelled. Raises RolloutBufferError when the service is gone for too long."""
        delays, trouble_since = BACKOFF.delays(), float("inf")
        log = self._service.wait_log("push groups")
        while True:
            await self._until_sendable()
            answered = sum(self._counters.pushed.values())
            token = self._service.tokens.current
            error = await self._stream()
            self._requeue()
            if sum(self._counters.pushed.values()) > answered:
                delays, trouble_since = BACKOFF.delays(), float("inf")
            if error is not None:
                if self._service.met(error) or self._service.renewed(error, token):
                    continue
                if error.attributes.get("process") == "full":
                    self._service.move()
                if worth_waiting(error):
                    trouble_since = min(trouble_since, time.monotonic())
                    if time.monotonic() - trouble_since > self._service.timeout_s:
                        raise error
                    log.say(on_whom(error, self._service.address), str(error))
                elif isinstance(error, AccessRefused):
                    raise error
                else:
                    self._counters.failed(error)
                    self._suspect(error)
            await asyncio.sleep(next(delays))

    async def _make_ready(self, parcel: Parcel) -> None:
        """Write the payload to the store, where that is possible and worth it, and say what is to be sent."""
        header, payload = parcel.header, parcel.payload
        if not header.lease_id and not header.first_revision:
            # Before it is written: what lies in the store is checked against the header.
            header.first_revision = await self._revision()
        serialized = header.SerializeToString()
        stored = None
        if self._writer is not None and parcel.misses < MAX_MISSES:
            self._writing += 1
            try:
                stored = await self._writer.write(serialized, payload)
            finally:
                self._writing -= 1
                self._wake()
        parcel.written = parcel.direct = stored is not None
        if stored is None:
            parcel.pieces = join_group(serialized, *payload)
            in_parts = part_count(sum(map(len, parcel.pieces))) > 0
            if not in_parts or not await self._service.max_group_bytes(header.worker_id):
                return
            stored = await self._service.write_payload(serialized, payload)
            parcel.written = True
        parcel.pieces = [stored_group(serialized, stored)]

    async def _too_large(self, header: groups_pb2.GroupHeader, payload_bytes: int) -> InvalidField | None:
        """Refusal of a group that the service takes in no way."""
        most = await self._service.max_group_bytes(header.worker_id)
        if payload_bytes <= (most or MAX_MESSAGE_BYTES - MAX_HEADER_BYTES):
            return None
        limit = f"{most} bytes (max_group_bytes)" if most else f"a message's {MAX_MESSAGE_BYTES} bytes"
        return InvalidField("payload", f"{payload_bytes} bytes", f"at most {limit}")

    async def _revision(self) -> int:
        if seen := self._service.ref().seen_revision:
            return seen
        async with self._asking:  # One asks for all.
            if not self._known_revision:
                self._known_revision = await self._service.revision()
        return self._known_revision

    # ── one stream ───────────────────────────────────────────────────────────

    async def _stream(self) -> RolloutBufferError | None:
        """Use one stream until it ends; returns its error, None when the service ended it in order."""
        self._known_revision = 0
        stream = self._service.push()
        end = StreamEnd(stream)
        sender = asyncio.create_task(self._send(stream), name="push sender")
        try:
            async for reply in stream:
                self._take(reply)
        except grpc.RpcError:
            return await end.error()
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            stream.cancel()
        return None

    async def _send(self, stream: PushStream) -> None:
        sequence = 0
        while True:
            await self._until_sendable()
            parcels = self._next_bundle()
            if not parcels:
                continue
            sequence += 1
            self._sent.append((sequence, parcels))
            message = join_push(self._service.ref(), sequence, [parcel.pieces for parcel in parcels])
            try:
                await stream.write(message)
                self._counters.bundled(sum(parcel.bundle_bytes for parcel in parcels))
            except (grpc.RpcError, asyncio.InvalidStateError):
                return  # The reader learns why.

    def _join(self, parcel: Parcel) -> None:
        self._waiting.join(parcel)
        self._wake()

    def _wake(self) -> None:
        if self._may_send():
            self._sendable.set()

    async def _until_sendable(self) -> None:
        while not self._may_send():
            self._sendable.clear()
            await self._sendable.wait()

    def _may_send(self) -> bool:
        if not len(self._waiting):
            return False
        if self._one_by_one:
            return not self._sent
        # A full bundle gains nothing by waiting; written groups alone are joined by those that are being written.
        joined = self._writing and not self._waiting.relayed
        full = self._waiting.bundle_bytes >= self._bundle_bytes
        return full or (not joined and len(self._sent) < BUNDLES_UNDER_WAY)

    def _next_bundle(self) -> list[Parcel]:
        parcels: list[Parcel] = []
        size = 0
        most = 1 if self._one_by_one else MAX_GROUPS_PER_BUNDLE
        while len(self._waiting) and len(parcels) < most:
            parcel = self._waiting.first
            if parcels and size + parcel.bundle_bytes > self._bundle_bytes:
                break
            self._waiting.take()
            if parcel.answer.done():
                continue
            parcels.append(parcel)
            size += parcel.bundle_bytes
        return parcels

    # ── answers ──────────────────────────────────────────────────────────────

    def _take(self, reply: groups_pb2.PushGroupsResponse) -> None:
        self._service.note(reply)
        while self._sent and self._sent[0][0] <= reply.sequence:
            sequence, parcels = self._sent.popleft()
            if sequence == reply.sequence and len(parcels) == len(reply.acks):
                for parcel, ack in zip(parcels, reply.acks, strict=True):
                    self._answer(parcel, ack)
                self._one_by_one = False
            else:
                self._waiting.return_to_head(parcels)
        self._room.notify()
        self._wake()

    def _answer(self, parcel: Parcel, ack: groups_pb2.PushAck) -> None:
        name = _OUTCOMES.get(ack.outcome, str(ack.outcome))
        if ack.outcome in (groups_pb2.PUSH_OUTCOME_REJECTED_FULL, groups_pb2.PUSH_OUTCOME_PAYLOAD_MISSING):
            self._counters.pushed[name] += 1
            if ack.outcome == groups_pb2.PUSH_OUTCOME_PAYLOAD_MISSING:
                parcel.misses += 1
                parcel.pieces = ()
            self._try_again(parcel)
            return
        error = from_detail(ack.error) if ack.HasField("error") else None
        if error is not None and error.attributes.get("field") == "first_revision" and parcel.answered:
            # It was known for sure that this group was not accepted, and is again: as of the present revision.
            parcel.header.first_revision = 0
            parcel.pieces = ()
            self._try_again(parcel)
            return
        self._settle(parcel, name, error)

    def _try_again(self, parcel: Parcel) -> None:
        if not parcel.answer.done():
            parcel.answer.set_result(None)

    async def _again_later(self, parcel: Parcel) -> None:
        """Put a parcel whose try was answered in line again, after a while."""
        delays = _REJECTED.delays()
        for _ in range(min(parcel.rejections, 8)):
            next(delays)
        parcel.rejections += 1
        await asyncio.sleep(next(delays))
        if not parcel.pieces:
            await self._make_ready(parcel)
        parcel.answer = asyncio.get_running_loop().create_future()
        self._join(parcel)

    def _settle(self, parcel: Parcel, outcome: str, error: RolloutBufferError | None) -> None:
        if not parcel.answer.done():
            self._close(parcel)
            self._counters.pushed_bytes["direct" if parcel.direct else "relayed"] += parcel.size_bytes
            parcel.answer.set_result(self._settled(outcome, error))

    def _close(self, parcel: Parcel) -> bool:
        """Take a parcel out of the window; False when it was out already."""
        if parcel not in self._open:
            return False
        self._open.remove(parcel)
        self._open_bytes -= parcel.size_bytes
        return True

    def _settled(self, outcome: str, error: RolloutBufferError | None) -> PushResult:
        self._counters.pushed[outcome] += 1
        return PushResult(outcome, error)

    # ── after a failure ──────────────────────────────────────────────────────

    def _requeue(self) -> None:
        """Put everything unanswered at the head of the line again, in order."""
        for _, parcels in reversed(self._sent):
            for parcel in parcels:
                parcel.answered = False
            self._waiting.return_to_head(parcels)
        self._sent.clear()

    def _suspect(self, error: RolloutBufferError) -> None:
        """Find the group that the service cannot take, after it refused a whole request, and give that one up."""
        if self._one_by_one and len(self._waiting):
            culprit = self._waiting.take()
            self._settle(culprit, "refused", error)
            self._room.notify()
            _log.error("group refused", task=culprit.header.task_id, error=str(error))
        self._one_by_one = True

    def _has_room(self, size_bytes: int) -> bool:
        if not self._open:
            return True
        return len(self._open) < self._window_groups and self._open_bytes + size_bytes <= self._window_bytes
