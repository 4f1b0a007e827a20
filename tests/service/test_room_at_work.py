"""Tests that what a process has no room for stays with its clients and in its store; all room comes back, whatever ends
an RPC.
"""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from buffer_service.domain import ops
from buffer_service.domain.command import Command
from buffer_service.observability.metrics import RpcMetrics
from buffer_service.rpc.convert.groups import Limits
from buffer_service.rpc.flow.ages import StreamAges
from buffer_service.rpc.flow.budget import ByteBudget, StreamSlots
from buffer_service.rpc.flow.drain import Drain
from buffer_service.rpc.flow.pushes import Pushes
from buffer_service.rpc.flow.room import Incoming, RawContext, Room
from buffer_service.rpc.flow.waiting import WaitingLines
from buffer_service.rpc.interceptor import Guard
from buffer_service.rpc.janitor import Janitor
from buffer_service.rpc.servicers.groups import GroupServicer
from buffer_service.rpc.streams.pull import PullStream
from buffer_service.rpc.streams.push import PushParts
from buffer_service.security.gate import Gate
from buffer_service.security.shares import Shares
from buffer_wire.connection.channel import client_options, server_options
from buffer_wire.connection.stream_end import StreamEnd
from buffer_wire.errors import InvalidField, NotReady
from buffer_wire.payloads.keys import group_checksum, payload_checksum, payload_key
from buffer_wire.revision import NO_REVISION, Revision
from rollout_buffer.v1 import batches_pb2, common_pb2, groups_pb2
from tests.security.serving import serving
from tests.support.rpc import make_group

if TYPE_CHECKING:
    from buffer_service.domain.ports import Notifications, RunStore

LIMITS = Limits(1 << 20, 1 << 20)
SOON_S = 20.0
MESSAGE_BYTES = 100_000
PAYLOAD_BYTES = MESSAGE_BYTES - 4
"""Size in bytes of the payload of a serialized group that has no header and is as large as a message."""
MESSAGES = 8
"""Messages for which there is room."""
RUN = common_pb2.RunRef(run_id="r")
METHOD = "/rollout_buffer.v1.GroupService/"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110 - gRPC tells nobody
            await asyncio.sleep(0.005)


def group_of(task_id: str) -> groups_pb2.Group:
    group = make_group(task_id, lengths=(MESSAGE_BYTES // 9 - 40,))
    assert 0.95 * MESSAGE_BYTES < group.ByteSize() < MESSAGE_BYTES - 100
    return group


def unary(task_id: str) -> bytes:
    return groups_pb2.PushGroupRequest(run=RUN, group=group_of(task_id)).SerializeToString()


def bundle(task_id: str, sequence: int) -> bytes:
    return groups_pb2.PushGroupsRequest(run=RUN, sequence=sequence, groups=[group_of(task_id)]).SerializeToString()


class SlowStore:
    """Takes what is pushed when it is let to; gives what is fetched at once."""

    def __init__(self) -> None:
        self.came: list[str] = []
        self.taken: list[str] = []
        self._allowed = asyncio.Semaphore(0)

    def allow(self, groups: int) -> None:
        for _ in range(groups):
            self._allowed.release()

    async def push(
        self, run_id: str, groups: list[ops.NewGroup], *, seen_revision: Revision = NO_REVISION
    ) -> ops.PushResult:
        names = [group.facts.task_id for group in groups]
        self.came += names
        for name in names:
            await self._allowed.acquire()
            self.taken.append(name)
        return ops.PushResult(
            Revision(1), [ops.Pushed(ops.PushKind.QUEUED, f"{name}/0") for name in names], ops.WeightVersion(1)
        )

    async def call(self, command: Command[ops.Batch]) -> ops.Batch:
        assert command.script == "pull"
        checksum = group_checksum(b"", payload_checksum(bytes(PAYLOAD_BYTES)))
        keys = [payload_key("r", i.to_bytes(16, "big"), checksum, MESSAGE_BYTES) for i in range(12)]
        shard = [ops.ShardGroup(f"g{i}/0", key, i, 0, 0) for i, key in enumerate(keys)]
        counted = ("groups", "samples", "tokens", "trajectories")
        totals: dict[str, Any] = dict.fromkeys((f"total_{what}" for what in counted), 12)
        rest: dict[str, Any] = {
            "staleness_sum": 0,
            "staleness_max": 0,
            "shard_tokens": 12,
            "replayed": False,
            "queued": 0,
            "reused_groups": 0,
        }
        return ops.Batch(
            revision=Revision(1),
            step=0,
            micro_batch=0,
            final=True,
            train_version=0,
            shard=shard,
            total_loss_tokens=12,
            **totals,
            **rest,
        )

    async def fetch(self, run_id: str, payload_keys: Sequence[str]) -> Sequence[ops.Buffer | None]:
        return [groups_pb2.Group(payload=bytes(PAYLOAD_BYTES)).SerializeToString() for _ in payload_keys]


@dataclass
class Process:
    store: SlowStore
    room: Room
    drain: Drain
    address: str

    def channel(self) -> Any:
        """A grpc.aio.Channel; the stubs would not have it make raw calls."""
        return grpc.aio.insecure_channel(self.address, options=client_options())


@asynccontextmanager
async def process() -> AsyncIterator[Process]:
    """The pushing half of one, with room for MESSAGES in memory."""
    store, drain, metrics = SlowStore(), Drain(), RpcMetrics(CollectorRegistry())
    as_store = cast("RunStore", store)
    room = Room(MESSAGES * MESSAGE_BYTES)
    pushes = Pushes(as_store, WaitingLines(cast("Notifications", None), drain), Janitor(as_store), metrics)
    budget = ByteBudget(1 << 30)
    groups = GroupServicer(
        PushParts(as_store, pushes, budget, Incoming(room), drain, StreamAges(0, metrics), metrics, LIMITS),
        StreamSlots(100),
    )
    methods = {
        "PushGroups": grpc.stream_stream_rpc_method_handler(groups.PushGroups),
        "PushGroup": grpc.stream_unary_rpc_method_handler(groups.PushGroup),
    }
    guard = Guard(metrics, Gate(None), Shares(0, 0))
    async with serving("rollout_buffer.v1.GroupService", methods, server_options(), [guard]) as address:
        yield Process(store, room, drain, address)
        # Each RPC gives its room back first, and what it holds of the budget as it ends.
        await until(lambda: room.used_bytes == room.waiting == budget.used_bytes == 0)


async def push_one(channel: Any, task_id: str) -> int:
    reply = await channel.unary_unary(f"{METHOD}PushGroup", None, None)(unary(task_id), timeout=SOON_S)
    outcome: int = groups_pb2.PushGroupResponse.FromString(reply).ack.outcome
    return outcome


async def push_many(channel: Any, name: str, count: int) -> int:
    async def bundles() -> AsyncIterator[bytes]:
        for number in range(1, count + 1):
            yield bundle(f"{name}{number}", number)

    acks = 0
    async for reply in channel.stream_stream(f"{METHOD}PushGroups", None, None)(bundles(), timeout=SOON_S):
        acks += len(groups_pb2.PushGroupsResponse.FromString(reply).acks)
    return acks


async def test_no_message_is_read_for_which_there_is_no_room() -> None:
    async with process() as own, own.channel() as channel, asyncio.TaskGroup() as tasks:
        alone = [tasks.create_task(push_one(channel, f"u{i}")) for i in range(12)]
        streams = [tasks.create_task(push_many(channel, f"s{i}-", 3)) for i in range(4)]
        await until(lambda: own.room.waiting > 0)
        for _ in range(24):
            await until(lambda: len(own.store.came) > len(own.store.taken))
            assert own.room.used_bytes <= own.room.limit_bytes
            assert len(own.store.came) - len(own.store.taken) <= MESSAGES
            own.store.allow(1)
        assert [await push for push in alone] == [groups_pb2.PUSH_OUTCOME_QUEUED] * 12
        assert [await stream for stream in streams] == [3] * 4


async def test_the_first_messages_are_taken_for_large() -> None:
    async with process() as own, own.channel() as channel, asyncio.TaskGroup() as tasks:
        pushes = [tasks.create_task(push_one(channel, f"u{i}")) for i in range(20)]
        await until(lambda: own.room.waiting > 0)
        assert own.room.used_bytes <= own.room.limit_bytes
        own.store.allow(20)
        await asyncio.gather(*pushes)


@pytest.mark.parametrize("end", ["cancel", "disconnect", "drain"])
async def test_all_room_comes_back_when_clients_go(end: str) -> None:
    async with process() as own, own.channel() as channel:
        clients: list[asyncio.Task[int]] = [asyncio.create_task(push_one(channel, f"u{i}")) for i in range(12)]
        clients += [asyncio.create_task(push_many(channel, f"s{i}-", 3)) for i in range(4)]
        # Some are at the store, some have been read, some wait for room.
        await until(lambda: len(own.store.came) >= MESSAGES // 2 and own.room.waiting > 0)
        match end:
            case "cancel":
                for client in clients:
                    client.cancel()
            case "disconnect":
                await channel.close()
            case _:
                own.drain.begin()
        # What is at the store is decided there.
        own.store.allow(100)
        await asyncio.gather(*clients, return_exceptions=True)


async def test_an_idle_stream_ends_in_order_when_others_need_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffer_service.rpc.streams.push.IDLE_S", 0.0)
    async with process() as own, own.channel() as channel:
        own.store.allow(100)
        idle = []
        for number in range(MESSAGES + 2):
            stream = channel.stream_stream(f"{METHOD}PushGroups", None, None)()
            await stream.write(bundle(f"i{number}", 1))
            assert groups_pb2.PushGroupsResponse.FromString(await stream.read()).sequence == 1
            idle.append(stream)
        # Each holds room for a next message, as large as its last; the first ones gave way to the last ones.
        assert await idle[0].read() is grpc.aio.EOF  # type: ignore[attr-defined]
        assert await idle[0].code() is grpc.StatusCode.OK
        assert await push_one(channel, "u") == groups_pb2.PUSH_OUTCOME_QUEUED
        await idle[-1].write(bundle("again", 2))
        assert groups_pb2.PushGroupsResponse.FromString(await idle[-1].read()).sequence == 2
        for stream in idle:
            stream.cancel()


async def test_a_unary_push_without_a_message_is_refused_and_of_two_the_first_is_taken() -> None:
    async with process() as own, own.channel() as channel:
        own.store.allow(1)
        as_stream = channel.stream_unary(f"{METHOD}PushGroup", None, None)
        call = as_stream(iter(()), timeout=SOON_S)
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        assert isinstance(await StreamEnd(call).error(), InvalidField)
        await as_stream(iter([unary("first"), unary("second")]), timeout=SOON_S)
        assert own.store.taken == ["first"]


async def test_a_failed_rpc_leaves_nothing_for_the_collector() -> None:
    """A cycle would keep the RPC and its messages until it is found, which with large messages is late."""

    async def refuse(_requests: object, _context: object) -> None:
        raise NotReady("not now")

    methods = {"PushGroup": grpc.stream_unary_rpc_method_handler(refuse)}
    guard = Guard(RpcMetrics(CollectorRegistry()), Gate(None), Shares(0, 0))
    async with (
        serving("rollout_buffer.v1.GroupService", methods, server_options(), [guard]) as address,
        grpc.aio.insecure_channel(address, options=client_options()) as channel,
    ):
        call = channel.unary_unary(f"{METHOD}PushGroup", None, None)
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                with pytest.raises(grpc.aio.AioRpcError):
                    await call(b"message")
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = {type(each).__name__ for each in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert not left & {"_ServicerContext", "RPCState", "NotReady"}


# ── pulls ────────────────────────────────────────────────────────────────────


class Reader:
    """A client that reads messages when it is let to."""

    def __init__(self, puller: PullStream, reads: int, *, direct: bool = False) -> None:
        self.received = 0
        self._allowed = asyncio.Semaphore(reads)
        request = batches_pb2.PullBatchRequest(run=RUN, term=1, step=0, world_size=1, direct=direct)
        pull = ops.Pull(term=1, step=0, rank=0, world_size=1, train_version=None)
        self.task = asyncio.create_task(puller.run(request, "r", pull, cast("RawContext", self)))

    def allow(self, reads: int) -> None:
        for _ in range(reads):
            self._allowed.release()

    async def write(self, message: bytes) -> None:
        await self._allowed.acquire()
        self.received += len(message)


def puller(room: Room) -> PullStream:
    notes: Any = type("Notes", (), {"ticket": lambda *_: 0})()
    metrics = RpcMetrics(CollectorRegistry())
    return PullStream(
        cast("RunStore", SlowStore()), WaitingLines(notes, Drain()), room, metrics, 1, LIMITS.message_bytes
    )


async def settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_slow_readers_hold_no_more_than_there_is_and_leave_room_for_a_fast_one() -> None:
    room = Room(2 * 10 * MESSAGE_BYTES)
    pulls = puller(room)
    # Each takes the facts of the batch, and then nothing.
    slow = [Reader(pulls, 1) for _ in range(6)]
    await settled()
    assert 0 < room.used_bytes <= room.limit_bytes
    fast = Reader(pulls, 1_000)
    async with asyncio.timeout(SOON_S):
        await fast.task
    assert fast.received > 12 * MESSAGE_BYTES
    slow[0].allow(1_000)
    async with asyncio.timeout(SOON_S):
        await slow[0].task
    for reader in slow[1:]:
        reader.task.cancel()
    await asyncio.gather(*(reader.task for reader in slow), return_exceptions=True)
    assert (room.used_bytes, room.waiting) == (0, 0)


async def test_groups_that_go_as_keys_take_no_room() -> None:
    room = Room(2 * 2 * MESSAGE_BYTES)
    held = await room.take(room.limit_bytes)
    reader = Reader(puller(room), 1_000, direct=True)
    async with asyncio.timeout(SOON_S):
        await reader.task
    assert 12 * 32 < reader.received < MESSAGE_BYTES
    assert room.moved_bytes == held.size
    held.close()


async def test_readers_that_stand_still_give_way_to_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(2 * 2 * MESSAGE_BYTES)
    pulls = puller(room)
    stuck = [Reader(pulls, 1) for _ in range(2)]
    await settled()
    fast = Reader(pulls, 1_000)
    await settled()
    assert room.waiting == 1, "there is none for it"
    assert not any(reader.task.done() for reader in stuck), "they may yet read"
    fast.task.cancel()
    # As if its time had passed.
    for wait, (_, share) in list(room._silent.items()):
        room._silent[wait] = 0.0, share
    fast = Reader(pulls, 1_000)
    async with asyncio.timeout(SOON_S):
        await fast.task
    for reader in stuck:
        reader.task.cancel()
    ends = await asyncio.gather(*(reader.task for reader in stuck), return_exceptions=True)
    assert any(isinstance(end, NotReady) and "neither sent nor read" in end.message for end in ends)
    assert (room.used_bytes, room.waiting) == (0, 0)
