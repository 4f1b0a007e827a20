"""Events of a recording, as the store keeps them, to the wire. docs/recording.md names their fields."""

from dataclasses import dataclass
from struct import unpack
from typing import Any

import msgpack

from buffer_service.domain import ops
from rollout_buffer.v1 import runs_pb2 as pb


@dataclass(frozen=True, slots=True)
class Event:
    """A record, with the payload key and size of its group's body if that is stored."""

    message: pb.Record
    payload_key: str = ""
    body_bytes: int = 0


def event(record: ops.Record) -> Event:
    """The message of a record; one of a kind that this version does not know has its id alone."""
    fields = msgpack.unpackb(record.data, raw=True, strict_map_key=False)
    match record.kind:
        case "accepted":
            return _accepted(record.event_id, fields)
        case "moved":
            now, group_id, state = fields
            moved = pb.GroupMoved(time_ms=now, group_id=_text(group_id), state=_text(state))
            return Event(pb.Record(event_id=record.event_id, moved=moved))
        case "round":
            now, step, number, train_version, group_ids = fields
            closed = pb.RoundClosed(
                time_ms=now,
                step=step,
                round=number,
                train_version=train_version,
                group_ids=[_text(group_id) for group_id in group_ids],
            )
            return Event(pb.Record(event_id=record.event_id, round=closed))
        case "trained":
            now, committed_steps = fields
            trained = pb.StepsTrained(time_ms=now, committed_steps=committed_steps)
            return Event(pb.Record(event_id=record.event_id, trained=trained))
        case _:
            return Event(pb.Record(event_id=record.event_id))


def _accepted(event_id: str, fields: list[Any]) -> Event:
    now, group_id, sequence, environment, lengths, rewards, tokens, size, head, tail, mean_milli, state, key = fields
    accepted = pb.GroupAccepted(
        time_ms=now,
        group_id=_text(group_id),
        sequence=sequence,
        environment=_text(environment),
        response_lengths=unpack(f"<{len(lengths) // 4}I", lengths),
        rewards=unpack(f"<{len(rewards) // 4}f", rewards),
        tokens=tokens,
        bytes=size,
        head_version=head,
        tail_version=tail,
        mean_version_milli=mean_milli,
        state=_text(state),
    )
    return Event(pb.Record(event_id=event_id, accepted=accepted), _text(key), size if key else 0)


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
