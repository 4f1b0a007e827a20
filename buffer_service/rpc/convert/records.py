"""Events of a recording, as the store keeps them, to the wire. docs/recording.md names their fields."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from struct import unpack
from typing import Any

import msgpack
from google.protobuf.message import Message

from buffer_service.domain import ops
from rollout_buffer.v1 import runs_pb2 as pb


@dataclass(frozen=True, slots=True)
class Event:
    """A record, with the payload key and size of its group's body if that is stored."""

    message: pb.Record
    payload_key: str = ""
    body_bytes: int = 0


_FIELDS: Mapping[str, tuple[type[Message], Sequence[str]]] = {
    "moved": (pb.GroupMoved, ("time_ms", "group_id", "state", "reason")),
    "micro_batch": (pb.MicroBatchClosed, ("time_ms", "step", "micro_batch", "train_version", "group_ids")),
    "reused": (pb.GroupsReused, ("time_ms", "step", "train_version", "group_ids")),
    "trained": (pb.StepsTrained, ("time_ms", "committed_steps")),
    "submitted": (pb.TaskSubmitted, ("time_ms", "task_id", "metadata_json")),
    "failed": (pb.TaskFailed, ("time_ms", "group_id", "error")),
    "rewarded": (pb.GroupRewarded, ("time_ms", "group_id", "rewards", "trajectory_rewards")),
}
"""Messages by kind of event, which is also their field of Record, and their fields in the order that is kept."""


def event(record: ops.Record) -> Event:
    """The message of a record; one of a kind that this version does not know has its id alone."""
    values = msgpack.unpackb(record.data, raw=True, strict_map_key=False)
    if record.kind == "accepted":
        return _accepted(record.event_id, values)
    if record.kind not in _FIELDS:
        return Event(pb.Record(event_id=record.event_id))
    kind, names = _FIELDS[record.kind]
    facts = {name: _plain(name, value) for name, value in zip(names, values, strict=False)}
    message: Any = kind(**facts)
    return Event(pb.Record(event_id=record.event_id, **{record.kind: message}))


def _accepted(event_id: str, fields: list[Any]) -> Event:
    now, group_id, sequence, environment, lengths, rewards, tokens, size, head, tail, mean_milli, *rest = fields
    state, key, *by_trajectory = rest
    accepted = pb.GroupAccepted(
        time_ms=now,
        group_id=_text(group_id),
        sequence=sequence,
        environment=_text(environment),
        response_lengths=unpack(f"<{len(lengths) // 4}I", lengths),
        rewards=_rewards(rewards),
        tokens=tokens,
        bytes=size,
        head_version=head,
        tail_version=tail,
        mean_version_milli=mean_milli,
        state=_text(state),
        trajectory_rewards=_rewards(by_trajectory[0] if by_trajectory else b""),
    )
    return Event(pb.Record(event_id=event_id, accepted=accepted), _text(key), size if key else 0)


def _plain(name: str, value: Any) -> Any:  # noqa: ANN401 - integers, bytes, and lists of them
    if isinstance(value, list):
        return [_plain(name, one) for one in value]
    if name in {"rewards", "trajectory_rewards"}:
        return _rewards(value)
    return _text(value) if isinstance(value, bytes) else value


def _rewards(packed: bytes) -> tuple[float, ...]:
    return unpack(f"<{len(packed) // 4}f", packed)


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
