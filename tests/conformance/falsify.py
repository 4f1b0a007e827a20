"""Changes to a record, so that it shows what a candidate with a defect would have done."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

from buffer_conformance.record import Entry, Exchange, Record
from buffer_conformance.views import PUSHES
from rollout_buffer.v1 import groups_pb2


def calls(record: Record, method: str, where: Callable[[Exchange], bool] = lambda _: True) -> list[Exchange]:
    found = [exchange for exchange in record.of(method) if where(exchange)]
    assert found, f"the record has no such {method}"
    return found


def change(exchange: Exchange, **fields: Any) -> None:
    """Set fields of the request; a message is merged as a whole."""
    request = exchange.requests[0].message
    for name, value in fields.items():
        if hasattr(value, "DESCRIPTOR"):
            getattr(request, name).CopyFrom(value)
        else:
            setattr(request, name, value)
    exchange.requests[0].raw = request.SerializeToString()


def after(record: Record, at_s: float, of: Exchange) -> Exchange:
    """A further call like `of`, at a time; in the record, to be changed."""
    made = copy.deepcopy(of)
    shift = at_s - made.began_s
    made.number, made.began_s, made.ended_s = len(record.exchanges) + 1, at_s, made.ended_s + shift
    for entry in (*made.requests, *made.replies):
        entry.at_s += shift
    seen = max(getattr(e.message, "revision", 0) for e in _replies_before(record, at_s))
    made.requests[0].message.run.seen_revision = seen
    change(made)
    record.exchanges.append(made)
    record.exchanges.sort(key=lambda exchange: exchange.began_s)
    return made


def _replies_before(record: Record, at_s: float) -> Iterator[Entry]:
    for exchange in record.exchanges:
        for entry in exchange.replies:
            if entry.delivered and entry.at_s <= at_s and exchange.method != "GetRun":
                yield entry


def change_groups(record: Record, how: Callable[[groups_pb2.Group], None], which: Callable[[str], bool]) -> None:
    """Change pushed groups in place, by lease."""
    found = False
    for exchange in record.of(*PUSHES):
        for entry in exchange.requests:
            for group in entry.message.groups:
                if which(group.header.lease_id):
                    how(group)
                    found = True
            entry.raw = entry.message.SerializeToString()
    assert found
