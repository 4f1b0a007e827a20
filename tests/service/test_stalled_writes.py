"""A client that stops in the middle of a payload in parts: what it held comes back to those who push."""

import asyncio
from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from buffer_service.observability.metrics import RpcMetrics
from buffer_service.rpc.convert.groups import Limits
from buffer_service.rpc.flow.budget import ByteBudget
from buffer_service.rpc.flow.drain import Drain
from buffer_service.rpc.flow.room import Incoming, Room
from buffer_service.rpc.streams import parts
from buffer_service.rpc.streams.parts import PartStreams
from buffer_service.security.gate import CALLER, Anybody
from buffer_wire.codec import join_written_part
from buffer_wire.errors import NotReady
from buffer_wire.payloads.keys import PART_BYTES, payload_key
from rollout_buffer.v1 import common_pb2

MIB = 1 << 20
SIZE = 9 * MIB


class Store:
    """Store that takes all parts."""

    async def call(self, _command: object) -> Any:
        return SimpleNamespace(policy=SimpleNamespace(max_queued_bytes=0, quota_bytes=0))

    async def write_part(self, _key: str, _body: object) -> bool:
        return True


class Client:
    """Client that sends these messages, and then neither sends nor leaves."""

    def __init__(self, *messages: bytes) -> None:
        self._messages = deque(messages)

    async def read(self) -> bytes:
        if not self._messages:
            await asyncio.Event().wait()
        return self._messages.popleft()


@pytest.mark.parametrize("sent", [0, 1])
async def test_who_sends_no_more_parts_is_told_to_write_again_and_holds_nothing(
    monkeypatch: pytest.MonkeyPatch, sent: int
) -> None:
    monkeypatch.setattr(parts, "PART_S", 0.05)
    CALLER.set(Anybody())
    room, budget = Room(100 * MIB), ByteBudget(8 * MIB)
    metrics = RpcMetrics(CollectorRegistry())
    store = cast("Any", Store())
    streams = PartStreams(store, Incoming(room), room, budget, Drain(), metrics, Limits(MIB, 100 * MIB))
    key = payload_key("r", b"n" * 16, 1, SIZE, 5)
    first = join_written_part(common_pb2.RunRef(run_id="r"), key, [bytes(PART_BYTES)])
    with pytest.raises(NotReady, match="no part came for"):
        async with asyncio.timeout(5):
            await streams.write(cast("Any", Client(*[first][:sent])))
    assert (budget.used_bytes, room.used_bytes, budget.has_room) == (0, 0, True)
