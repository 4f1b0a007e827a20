"""Changes to a record, so that it shows what a candidate with a defect would have done."""

import copy
from collections.abc import Callable
from typing import Any

from buffer_conformance.record import Exchange, Record
from buffer_conformance.rules.views import PUSHES
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
    for entry in made.replies:
        # Nothing that anybody else would have had to remember.
        if hasattr(entry.message, "revision_proof"):
            entry.message.ClearField("revision")
            entry.message.ClearField("revision_proof")
    record.exchanges.append(made)
    record.exchanges.sort(key=lambda exchange: exchange.began_s)
    remember(record)
    return made


def remember(record: Record) -> None:
    """Have every request name the highest revision received, after replies were taken out of the record."""
    received = [
        (entry.at_s, entry.message.revision, entry.message.revision_proof)
        for exchange in record.exchanges
        for entry in exchange.replies
        if entry.delivered and hasattr(entry.message, "revision_proof")
    ]
    for exchange in record.exchanges:
        for entry in exchange.requests:
            if hasattr(entry.message, "run"):
                run = entry.message.run
                known = [(revision, proof) for at, revision, proof in received if at <= entry.at_s]
                run.seen_revision, run.seen_proof = max(known, default=(0, ""))
                entry.raw = entry.message.SerializeToString()


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
