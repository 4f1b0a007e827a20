"""Views of a record in the rules' terms: leases with their renewals and ends, pushed groups with their answers."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from buffer_conformance.record import Exchange, Record
from buffer_wire.codec import split_push, split_push_one
from rollout_buffer.v1 import groups_pb2, tasks_pb2, weights_pb2

FINAL = frozenset(
    {
        groups_pb2.PUSH_OUTCOME_QUEUED,
        groups_pb2.PUSH_OUTCOME_DUPLICATE,
        groups_pb2.PUSH_OUTCOME_CLOSED,
        groups_pb2.PUSH_OUTCOME_FILTERED,
        groups_pb2.PUSH_OUTCOME_RECORDED,
    }
)
"""Outcomes after which there is nothing left to do for a lease."""

PUSHES = ("PushGroups", "PushGroup")


@dataclass(frozen=True, slots=True)
class Push:
    """A group that was sent once in a push, with its answer."""

    at_s: float
    exchange: Exchange
    body: bytes
    """The serialized Group."""
    group: groups_pb2.Group
    ack: groups_pb2.PushAck | None
    """Answer to the push; None where none reached the candidate."""
    acked_s: float

    @property
    def lease_id(self) -> str:
        """Empty for a push without a lease."""
        return self.group.header.lease_id

    @property
    def is_final(self) -> bool:
        """True when the answer ends the lease."""
        return self.ack is not None and self.ack.outcome in FINAL

    def __str__(self) -> str:
        return f"{self.exchange}, group of {self.lease_id or self.group.header.task_id!r} at {self.at_s:.1f} s"


def pushes(record: Record) -> Iterator[Push]:
    """Pushes of groups, in order within each call."""
    for exchange in record.of(*PUSHES):
        single = exchange.method == "PushGroup"
        acks = {} if single else {e.message.sequence: e for e in exchange.replies if e.message and e.delivered}
        for request in exchange.requests:
            if request.message is None:
                continue
            split = split_push_one(request.raw) if single else split_push(request.raw)
            answer = acks.get(split.sequence)
            for i, body in enumerate(split.groups):
                ack, acked_s = None, float("inf")
                if single and exchange.reply is not None:
                    ack, acked_s = exchange.reply.ack, exchange.replied_s
                elif answer is not None and i < len(answer.message.acks):
                    ack, acked_s = answer.message.acks[i], answer.at_s
                raw = bytes(body)
                yield Push(request.at_s, exchange, raw, groups_pb2.Group.FromString(raw), ack, acked_s)


@dataclass(slots=True)
class HeldLease:
    """A lease that reached the candidate."""

    lease: tasks_pb2.Lease
    asked: Exchange
    granted_s: float
    renewed: list[float] = field(default_factory=list)
    """Arrival times of heartbeats for this lease that were answered LIVE, or not at all."""
    ends: list[tuple[float, float, str, Exchange]] = field(default_factory=list)
    """Ends of the lease: asked at, answered at, how ("pushed", "returned", "lost"), in which call."""

    @property
    def worker(self) -> tuple[str, str]:
        """Id and instance id of the worker that was granted the lease."""
        request = self.asked.request
        return request.worker_id, request.instance_id

    def is_live(self, at_s: float) -> bool:
        """True when it has been granted or renewed within its time to live, and has not ended."""
        renewed = [at for at in (self.granted_s, *self.renewed) if at <= at_s]
        return bool(renewed) and max(renewed) + self.lease.ttl_ms / 1000 > at_s and self.ended_s > at_s

    @property
    def ended_s(self) -> float:
        """Time at which the candidate learned of the first end; infinity for never."""
        return min((answered for _, answered, _, _ in self.ends), default=float("inf"))

    @property
    def lost_s(self) -> float:
        """Time at which the candidate learned that the lease is lost; infinity for never."""
        return min((answered for _, answered, how, _ in self.ends if how == "lost"), default=float("inf"))


def leases(record: Record) -> dict[str, HeldLease]:
    """Leases that reached the candidate, by id."""
    held: dict[str, HeldLease] = {}
    for exchange in record.of("LeaseTasks"):
        for lease in exchange.reply.leases if exchange.reply is not None else ():
            held.setdefault(lease.lease_id, HeldLease(lease, exchange, exchange.replied_s))
    for exchange, request, reply in extensions(record):
        _heartbeat(held, exchange, request, reply)
    for exchange in record.of("ReturnLeases"):
        for back in exchange.request.returns if exchange.reply is not None else ():
            if back.lease_id in held:
                end = (exchange.began_s, exchange.replied_s, "returned", exchange)
                held[back.lease_id].ends.append(end)
    for push in pushes(record):
        if push.lease_id in held and push.is_final:
            held[push.lease_id].ends.append((push.at_s, push.acked_s, "pushed", push.exchange))
    return held


def extensions(
    record: Record,
) -> Iterator[tuple[Exchange, tasks_pb2.ExtendLeasesRequest, tasks_pb2.ExtendLeasesResponse | None]]:
    """Extensions of leases, those that were sent together too, each with its reply, if there was one."""
    for exchange in record.of("ExtendLeases", "Heartbeat"):
        if exchange.method == "ExtendLeases":
            yield exchange, exchange.request, exchange.reply
        else:
            replies = exchange.reply.extended if exchange.reply is not None else ()
            for i, request in enumerate(exchange.request.extensions):
                yield exchange, request, replies[i] if i < len(replies) else None


def _heartbeat(
    held: dict[str, HeldLease],
    exchange: Exchange,
    request: tasks_pb2.ExtendLeasesRequest,
    reply: tasks_pb2.ExtendLeasesResponse | None,
) -> None:
    states = reply.states if reply is not None else ()
    for i, lease_id in enumerate(request.lease_ids):
        lease = held.get(lease_id)
        if lease is None:
            continue
        state = states[i] if i < len(states) else tasks_pb2.LEASE_STATE_LIVE
        if state == tasks_pb2.LEASE_STATE_LIVE:
            lease.renewed.append(exchange.began_s)
        else:
            lease.ends.append((exchange.began_s, exchange.replied_s, "lost", exchange))


def reports(record: Record) -> dict[str, list[tuple[Exchange, weights_pb2.EngineReport]]]:
    """Reports by engine, in order of arrival."""
    found: dict[str, list[tuple[Exchange, weights_pb2.EngineReport]]] = {}
    for exchange in record.of("ReportEngine", "Heartbeat"):
        requests = [exchange.request] if exchange.method == "ReportEngine" else exchange.request.reports
        for request in requests:
            found.setdefault(request.report.engine_id, []).append((exchange, request.report))
    return found


def stamp(version: Any) -> tuple[int, int]:  # noqa: ANN401 - a WeightVersion
    """Pair (term, version) of a weight version."""
    return version.term, version.version


def without_run(exchange: Exchange, *fields: str) -> bytes:
    """The request without the run reference, and without these fields, for comparing repeats."""
    request = type(exchange.request).FromString(exchange.requests[0].raw)
    for name in ("run", *fields):
        request.ClearField(name)
    return bytes(request.SerializeToString(deterministic=True))


def disturbed(record: Record, since_s: float, until_s: float) -> bool:
    """True when the service was away for some of this time."""
    ends = [mark.at_s for mark in record.marked("back")]
    for away in record.marked("away"):
        back = next((end for end in ends if end >= away.at_s), float("inf"))
        if away.at_s <= until_s and since_s <= back:
            return True
    return False


def process_ends(record: Record) -> list[float]:
    """Times at which the candidate was told to end, or ended, in order."""
    return [mark.at_s for mark in record.marks if mark.kind in ("sigterm", "exit", "taken_over", "end")]


def ends_within(record: Record, at_s: float, within_s: float) -> bool:
    """True when the candidate was told to end, or ended, soon after this time."""
    return any(at_s - 0.5 <= end <= at_s + within_s for end in process_ends(record))
