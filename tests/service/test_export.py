"""The export of a recording, on a store that the test makes up: portions, message sizes, bodies."""

from collections.abc import Sequence
from struct import pack
from typing import TYPE_CHECKING, cast

import msgpack
import pytest

from buffer_service.domain import ops
from buffer_service.domain.command import Command
from buffer_service.rpc.streams import export as export_stream
from buffer_service.rpc.streams.export import MESSAGE_BYTES, PORTION_RECORDS, READ_BYTES, exported
from buffer_wire.codec import split_group
from buffer_wire.errors import InvalidField, UnknownRun
from buffer_wire.payloads.keys import group_checksum, new_nonce, payload_checksum, payload_key
from buffer_wire.revision import Revision
from rollout_buffer.v1 import runs_pb2 as pb
from tests.support.rpc import make_group

if TYPE_CHECKING:
    from buffer_service.domain.ports import RunStore


def record(number: int, kind: str, *fields: object) -> ops.Record:
    return ops.Record(f"{number}-0", kind, msgpack.packb(fields, use_bin_type=False))


def accepted(number: int, key: str = "", size: int = 0, state: str = "queued", samples: int = 2) -> ops.Record:
    return record(
        number,
        "accepted",
        1_000 + number,
        f"t{number}/0",
        number,
        "math",
        pack(f"<{samples}I", *range(1, samples + 1)),
        pack(f"<{samples}f", *([0.5] * samples)),
        30,
        size,
        3,
        4,
        3_500,
        state,
        key,
    )


def key_of(body: bytes) -> str:
    header, payload = split_group(memoryview(body))
    return payload_key("r", new_nonce(), group_checksum(header, payload_checksum(payload)), len(body))


class Shelf:
    """A run's events, and the bodies that are still there."""

    def __init__(self, records: Sequence[ops.Record], bodies: dict[str, bytes] | None = None) -> None:
        self.stored = list(records)
        self.bodies = bodies or {}
        self.limits: list[int] = []
        self.reads: list[list[str]] = []

    async def call(self, command: Command[ops.WeightsView]) -> ops.WeightsView:
        assert command.script == "weights"
        if command.run_id != "r":
            raise UnknownRun(command.run_id)
        return ops.WeightsView(Revision(1), ops.WeightVersion(1), b"", paused=False)

    async def records(self, run_id: str, after: str, limit: int) -> Sequence[ops.Record]:
        self.limits.append(limit)
        start = 0
        if after:
            start = 1 + [item.event_id for item in self.stored].index(after)
        return self.stored[start : start + limit]

    async def fetch(self, run_id: str, payload_keys: Sequence[str]) -> Sequence[bytes | None]:
        self.reads.append(list(payload_keys))
        return [self.bodies.get(key) for key in payload_keys]


async def messages(shelf: Shelf, after: str = "", *, include_groups: bool = False) -> list[pb.ExportRecordsResponse]:
    store = cast("RunStore", shelf)
    return [message async for message in exported(store, "r", after, include_groups=include_groups)]


async def test_every_kind_of_event_says_what_happened() -> None:
    shelf = Shelf(
        [
            accepted(1, state="filtered"),
            record(2, "moved", 7, "t1/0", "dropped_stale"),
            record(3, "micro_batch", 8, 4, 1, 9, ["t1/0", "t2/0"]),
            record(4, "trained", 9, 5),
        ]
    )
    (message,) = await messages(shelf)
    group, moved, closed, trained = message.records
    assert [item.event_id for item in message.records] == ["1-0", "2-0", "3-0", "4-0"]
    assert group.accepted == pb.GroupAccepted(
        time_ms=1_001,
        group_id="t1/0",
        sequence=1,
        environment="math",
        response_lengths=[1, 2],
        rewards=[0.5, 0.5],
        tokens=30,
        head_version=3,
        tail_version=4,
        mean_version_milli=3_500,
        state="filtered",
    )
    assert moved.moved == pb.GroupMoved(time_ms=7, group_id="t1/0", state="dropped_stale")
    assert closed.micro_batch == pb.MicroBatchClosed(
        time_ms=8, step=4, micro_batch=1, train_version=9, group_ids=["t1/0", "t2/0"]
    )
    assert trained.trained == pb.StepsTrained(time_ms=9, committed_steps=5)


async def test_a_long_recording_is_read_in_portions_and_sent_whole() -> None:
    shelf = Shelf([accepted(number) for number in range(2 * PORTION_RECORDS + 1)])
    found = [item.event_id for message in await messages(shelf) for item in message.records]
    assert found == [item.event_id for item in shelf.stored]
    assert set(shelf.limits) == {PORTION_RECORDS}


async def test_an_export_goes_on_after_an_event() -> None:
    shelf = Shelf([accepted(number) for number in range(5)])
    (message,) = await messages(shelf, after="2-0")
    assert [item.event_id for item in message.records] == ["3-0", "4-0"]
    assert await messages(shelf, after="4-0") == []


async def test_messages_are_bounded_in_bytes() -> None:
    shelf = Shelf([accepted(number, samples=1_024) for number in range(600)])
    parts = await messages(shelf)
    assert len(parts) > 1
    assert max(part.ByteSize() for part in parts) < MESSAGE_BYTES + (16 << 10)
    assert sum(len(part.records) for part in parts) == 600


async def test_groups_come_along_where_they_are_asked_for_and_still_there() -> None:
    group = make_group("t1", lengths=(300, 200))
    body = group.SerializeToString()
    key, damaged = key_of(body), key_of(body)
    records = [accepted(1, key, len(body)), accepted(2, "k2", 10), accepted(3), accepted(4, damaged, len(body))]
    records.append(accepted(5, "larger than a message", (64 << 20) + 1))
    shelf = Shelf(records, {key: body, damaged: b"\xff" * len(body)})
    message, large = await messages(shelf, include_groups=True)
    assert message.records[0].accepted.group == group
    assert not any(one.accepted.HasField("group") for one in [*message.records[1:], *large.records])
    assert shelf.reads == [[key, "k2", damaged]]
    (bare,) = await messages(shelf)
    assert not bare.records[0].accepted.HasField("group")


async def test_bodies_are_read_a_few_megabytes_at_a_time() -> None:
    body = make_group("t", lengths=(100_000,)).SerializeToString()
    assert 3 * len(body) < READ_BYTES < 6 * len(body)
    count = 20
    keys = [key_of(body) for _ in range(count)]
    shelf = Shelf([accepted(n, key, len(body)) for n, key in enumerate(keys)], dict.fromkeys(keys, body))
    parts = await messages(shelf, include_groups=True)
    assert max(map(len, shelf.reads)) * len(body) <= READ_BYTES
    assert [key for read in shelf.reads for key in read] == keys
    assert max(part.ByteSize() for part in parts) < MESSAGE_BYTES + len(body)
    assert sum(len(part.records) for part in parts) == count


async def test_an_unknown_run_is_named() -> None:
    with pytest.raises(UnknownRun):
        async for _ in exported(cast("RunStore", Shelf([])), "nobody", "", include_groups=False):
            pass


@pytest.mark.parametrize("event_id", ["1", "a-b", "-", "1-1-1", "+"])
def test_a_malformed_event_id_is_refused(event_id: str) -> None:
    with pytest.raises(InvalidField) as error:
        export_stream.after(pb.ExportRecordsRequest(after=event_id))
    assert error.value.attributes["field"] == "after"
