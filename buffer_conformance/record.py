"""Record of every call, message, error and time between the candidate and the service, and of what the kit did.

Invariants: entries are appended in the order in which the proxy saw them. A reply counts as delivered when the proxy
passed it on, a request as arrived when the proxy read it. Times are seconds since the record began.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError, Message

from buffer_conformance.methods import BY_PATH, METHODS
from rollout_buffer.v1 import common_pb2

OPEN = ""
UNANSWERED = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN"})
"""Statuses that, without an ErrorDetail, leave it open whether the service has done what it was asked."""


@dataclass(slots=True)
class Entry:
    """A message of a call. `message` is None where the bytes do not parse as the contract's message."""

    at_s: float
    raw: bytes
    message: Any
    delivered: bool


@dataclass(slots=True)
class Exchange:
    """An RPC of the candidate, with its messages and its end."""

    number: int
    method: str
    """Short name, for example LeaseTasks; the whole path of what is not in the contract."""
    began_s: float
    requests: list[Entry] = field(default_factory=list)
    replies: list[Entry] = field(default_factory=list)
    ended_s: float = float("inf")
    status: str = OPEN
    error: common_pb2.ErrorDetail | None = None
    fault: str = ""
    """Fault that the kit applied to the call, in words; empty for none."""

    @property
    def request(self) -> Any:  # noqa: ANN401 - a message of its method
        """The first request."""
        return self.requests[0].message if self.requests else None

    @property
    def reply(self) -> Any:  # noqa: ANN401 - a message of its method
        """The reply of a unary call, where it reached the candidate."""
        delivered = self.status == "OK" and self.replies and self.replies[0].delivered
        return self.replies[0].message if delivered else None

    @property
    def replied_s(self) -> float:
        """Time at which the first reply was passed on; infinity for never."""
        return next((entry.at_s for entry in self.replies if entry.delivered), float("inf"))

    @property
    def unanswered(self) -> bool:
        """True when the candidate cannot know whether the service has done what it asked."""
        return self.reply is None and (self.status == OPEN or (self.status in UNANSWERED and self.error is None))

    def __str__(self) -> str:
        return f"call {self.number} ({self.method} at {self.began_s:.1f} s)"


@dataclass(frozen=True, slots=True)
class Mark:
    """Mark of an event that the kit caused or saw: `kind` with its `data`."""

    at_s: float
    kind: str
    data: dict[str, Any]


class Record:
    """Record of all calls and marks, in order."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.exchanges: list[Exchange] = []
        self.marks: list[Mark] = []

    def now_s(self) -> float:
        """Seconds since the record began."""
        return time.monotonic() - self._began

    @property
    def ended_s(self) -> float:
        """Time of the last mark or of the last call's beginning; 0 for an empty record."""
        return max([mark.at_s for mark in self.marks] + [exchange.began_s for exchange in self.exchanges], default=0.0)

    def open(self, path: str) -> Exchange:
        """A call has arrived."""
        name = BY_PATH[path].name if path in BY_PATH else path
        exchange = Exchange(len(self.exchanges) + 1, name, self.now_s())
        self.exchanges.append(exchange)
        return exchange

    def entry(self, exchange: Exchange, raw: bytes, *, request: bool) -> Entry:
        """A message has arrived, or is about to be passed on (`delivered` says whether it was)."""
        entry = Entry(self.now_s(), raw, _parsed(exchange.method, raw, request=request), request)
        (exchange.requests if request else exchange.replies).append(entry)
        return entry

    def mark(self, kind: str, **data: Any) -> None:  # noqa: ANN401 - whatever belongs to the kind
        """Note something that is not a call."""
        self.marks.append(Mark(self.now_s(), kind, data))

    def of(self, *methods: str) -> Iterator[Exchange]:
        """Calls of these methods that have a request, in order of arrival."""
        return (e for e in self.exchanges if e.method in methods and e.request is not None)

    def marked(self, kind: str) -> list[Mark]:
        """Marks of a kind, in order."""
        return [mark for mark in self.marks if mark.kind == kind]

    def lines(self) -> Iterator[dict[str, Any]]:
        """The record as JSON values, calls and marks in order of time; payloads are left out."""
        events: list[tuple[float, dict[str, Any]]] = [
            (m.at_s, {"at_s": round(m.at_s, 3), "mark": m.kind, **m.data}) for m in self.marks
        ]
        events += [(e.began_s, _exchange_line(e)) for e in self.exchanges]
        return (line for _, line in sorted(events, key=lambda event: event[0]))


def _parsed(method: str, raw: bytes, *, request: bool) -> Message | None:
    known = METHODS.get(method)
    if known is None:
        return None
    try:
        return (known.request if request else known.reply).FromString(raw)
    except DecodeError:
        return None


def _exchange_line(exchange: Exchange) -> dict[str, Any]:
    return {
        "at_s": round(exchange.began_s, 3),
        "call": exchange.number,
        "method": exchange.method,
        "requests": [_entry_line(entry) for entry in exchange.requests],
        "replies": [{**_entry_line(entry), "delivered": entry.delivered} for entry in exchange.replies],
        "status": exchange.status or "open",
        "error": exchange.error.reason if exchange.error is not None else "",
        "fault": exchange.fault,
    }


def _entry_line(entry: Entry) -> dict[str, Any]:
    message = MessageToDict(entry.message, preserving_proto_field_name=True) if entry.message is not None else None
    return {"at_s": round(entry.at_s, 3), "bytes": len(entry.raw), "message": _without_payloads(message)}


def _without_payloads(value: Any) -> Any:  # noqa: ANN401 - a JSON value
    if isinstance(value, dict):
        return {k: "..." if k == "payload" else _without_payloads(v) for k, v in value.items()}
    return [_without_payloads(item) for item in value] if isinstance(value, list) else value
