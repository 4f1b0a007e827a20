"""The rules of a run as a trainer states them.

Invariant: a field that is None is not sent, so that the service's default applies; `run().policy` has every
field filled in with what is in force.
"""

from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, get_args

from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import runs_pb2 as pb

OverflowAction: TypeAlias = Literal["drop_oldest", "block", "reject"]
StaleAction: TypeAlias = Literal["drop", "recycle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a run does with groups and tasks. Bounds are the service's; a breach names the field."""

    batch_groups: int | None = None
    """N, groups of a batch, 1 to 65,536; default 32."""
    max_queued_groups: int | None = None
    """Default: batch_groups (queue factor 1)."""
    max_queued_tokens: int | None = None
    """Over all queued samples; default 0, no cap."""
    max_queued_bytes: int | None = None
    """Default 8 GiB."""
    overflow_action: OverflowAction | None = None
    """What a push into a full queue meets; default drop_oldest."""
    max_staleness: int | None = None
    """η in versions: staler groups never reach a batch. Default: no gate."""
    stale_action: StaleAction | None = None
    """What happens to a group that is too stale; default drop."""
    max_inflight_groups: int | None = None
    """Cap on groups being generated; default 0, no cap."""
    reserve_queue_space: bool | None = None
    """Lease only what would still fit into the queue; default False."""
    max_lookahead: int | None = None
    """AReaL's cap: (this + published version + 1) · batch_groups groups may exist in all. Default: no cap."""
    lease_ttl_ms: int | None = None
    """Default 60,000."""
    max_attempts: int | None = None
    """Attempts of a task that may fail before the task does; default 5."""
    retry_backoff_ms: int | None = None
    """First back-off of a failed task; default 500."""
    failure_budget: int | None = None
    """Failed tasks that the run survives. Default: no limit."""
    max_pending_tasks: int | None = None
    """Default 10,000."""
    prefetch_batches: int | None = None
    """Batches pulled ahead of the one being trained, 0 to 64; default 0. A session fills it in."""
    batches_per_publish: int | None = None
    """Batches trained between two publishes; default 1."""
    retained_steps: int | None = None
    """Committed steps kept for replay when the trainer does not checkpoint; default 64."""

    def to_wire(self) -> pb.RunPolicy:
        """The message of the set fields. Raises InvalidField for a value that the message cannot hold."""
        wire = pb.RunPolicy()
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if field.name in _ACTIONS:
                value = _action_number(field.name, value)
            try:
                setattr(wire, field.name, value)
            except (TypeError, ValueError) as error:
                raise InvalidField(f"policy.{field.name}", value, f"a number in range ({error})") from error
        return wire

    @classmethod
    def from_wire(cls, wire: pb.RunPolicy) -> "Policy":
        """The inverse of `to_wire`."""
        values: dict[str, object] = {}
        for field in fields(cls):
            if field.name in _ACTIONS:
                number = getattr(wire, field.name)
                values[field.name] = _action_name(field.name, number) if number else None
            elif wire.HasField(field.name):  # type: ignore[arg-type]
                values[field.name] = getattr(wire, field.name)
        return cls(**values)  # type: ignore[arg-type]


_ACTIONS = {
    "overflow_action": (pb.OverflowAction, "OVERFLOW_ACTION_", get_args(OverflowAction)),
    "stale_action": (pb.StaleAction, "STALE_ACTION_", get_args(StaleAction)),
}


def _action_number(field: str, name: str) -> int:
    enum, prefix, names = _ACTIONS[field]
    if name not in names:
        raise InvalidField(f"policy.{field}", name, "one of " + ", ".join(names))
    return enum.Value(prefix + name.upper())


def _action_name(field: str, number: int) -> str:
    enum, prefix, _ = _ACTIONS[field]
    return enum.Name(number).removeprefix(prefix).lower()  # type: ignore[arg-type]
