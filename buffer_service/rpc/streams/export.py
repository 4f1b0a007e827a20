"""Export of a run's recording: events in portions, in messages of about 1 MiB, to the end of what is there.

With the groups themselves a portion reads their bodies in several calls. So a slow reader makes the service hold no
more than a few megabytes for it.
"""

import re
from collections.abc import AsyncGenerator, Iterator, Sequence

from buffer_service import commands
from buffer_service.domain.ports import RunStore
from buffer_service.rpc.convert.records import Event, event
from buffer_service.stored_groups import undamaged
from buffer_wire.errors import InvalidField
from buffer_wire.limits import MAX_MESSAGE_BYTES
from rollout_buffer.v1 import groups_pb2
from rollout_buffer.v1 import runs_pb2 as pb

PORTION_RECORDS = 1_000
MESSAGE_BYTES = 1 << 20
READ_BYTES = 4 << 20
"""Bodies that are read in one call, unless a single one is larger."""

_EVENT_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")


def after(request: pb.ExportRecordsRequest) -> str:
    """The event id that the export goes on from. Raises InvalidField."""
    if request.after and not _EVENT_ID.fullmatch(request.after):
        raise InvalidField("after", request.after, "empty, or the event_id of a record")
    return request.after


async def exported(
    store: RunStore, run_id: str, last_id: str, *, include_groups: bool
) -> AsyncGenerator[pb.ExportRecordsResponse]:
    """Messages of an export. Raises UnknownRun."""
    # A run that is not there has no records either; that must not look the same.
    await store.call(commands.weights(run_id))
    while records := await store.records(run_id, last_id, PORTION_RECORDS):
        last_id = records[-1].event_id
        events = [event(record) for record in records]
        for part in _parts(events) if include_groups else [events]:
            if include_groups:
                await _add_groups(store, run_id, part)
            for message in _messages(part):
                yield message


def _parts(events: Sequence[Event]) -> Iterator[Sequence[Event]]:
    """Events whose bodies are read together."""
    start = size = 0
    for i, item in enumerate(events):
        if i > start and size + item.body_bytes > READ_BYTES:
            yield events[start:i]
            start, size = i, 0
        size += item.body_bytes
    yield events[start:]


async def _add_groups(store: RunStore, run_id: str, events: Sequence[Event]) -> None:
    stored = [item for item in events if item.payload_key and item.body_bytes <= MAX_MESSAGE_BYTES]
    if not stored:
        return
    bodies = await store.fetch(run_id, [item.payload_key for item in stored])
    for item, stored_body in zip(stored, bodies, strict=True):
        if (body := undamaged(item.payload_key, stored_body)) is not None:
            item.message.accepted.group.CopyFrom(groups_pb2.Group.FromString(bytes(body)))


def _messages(events: Sequence[Event]) -> Iterator[pb.ExportRecordsResponse]:
    """Messages of at most MESSAGE_BYTES, unless a single record is larger."""
    part: list[pb.Record] = []
    size = 0
    for item in events:
        record_bytes = item.message.ByteSize()
        if part and size + record_bytes > MESSAGE_BYTES:
            yield pb.ExportRecordsResponse(records=part)
            part, size = [], 0
        part.append(item.message)
        size += record_bytes
    if part:
        yield pb.ExportRecordsResponse(records=part)
