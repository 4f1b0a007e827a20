"""Rules that hold for workers and trainers alike."""

from collections.abc import Callable, Hashable, Iterable
from itertools import pairwise

from buffer_conformance.record import OPEN, Entry, Exchange, Record
from buffer_conformance.rules.rule import Finding
from buffer_conformance.rules.views import ends_within

SETTLING_S = 0.5
"""A reply may be on its way to the candidate, or not be looked at yet, for so long."""

ASKED_AGAIN_S = 10.0
"""An unanswered call is asked again within so long, unless the candidate ends."""

_LONG_STREAMS = frozenset({"PushGroups", "WatchWeights"})
MOST_IN_A_SECOND = 20
_MALFORMED = frozenset({"invalid_request", "invalid_field", "invalid_policy"})


def seen_revision(record: Record, finding: Finding) -> None:
    """`seen_revision` is the highest revision received, and `seen_proof` its proof. One without a proof is a view's."""
    replies = [
        (exchange, entry)
        for exchange in record.exchanges
        for entry in exchange.replies
        if entry.delivered and hasattr(entry.message, "revision_proof")
    ]
    received = [(entry.at_s, entry.message.revision, _is_binding(exchange, entry)) for exchange, entry in replies]
    proofs = {entry.message.revision: entry.message.revision_proof for _, entry in replies}
    for exchange in record.exchanges:
        for entry in exchange.requests:
            run = getattr(entry.message, "run", None)
            if run is None or not hasattr(run, "seen_revision"):
                continue
            at, seen = entry.at_s, run.seen_revision
            began = max((m.at_s for m in record.marked("start") if m.at_s <= at), default=0.0)
            least = max((r for t, r, bound in received if bound and began <= t <= at - SETTLING_S), default=0)
            most = max((r for t, r, _ in received if t <= at), default=0)
            finding.expect(
                least <= seen <= most,
                f"{exchange} names seen_revision {seen}; what it had received says {least}"
                + (f" to {most}" if most != least else ""),
            )
            proof = proofs.get(seen, "")
            finding.expect(
                run.seen_proof == proof or not least <= seen <= most,
                f"{exchange} names seen_revision {seen} with the proof {run.seen_proof!r}; it came with {proof!r}",
            )


def _is_binding(exchange: Exchange, entry: Entry) -> bool:
    """True when the candidate must know the reply's revision: it acknowledges something, and has surely arrived."""
    if exchange.method in _LONG_STREAMS:
        return exchange.status in ("OK", OPEN) or entry.at_s < exchange.ended_s - SETTLING_S
    return exchange.status == "OK"


def well_formed(record: Record, finding: Finding) -> None:
    """Rule: no request is refused for its form."""
    for exchange in record.exchanges:
        error = exchange.error
        bad = error is not None and error.reason in _MALFORMED
        unknown = exchange.status == "UNIMPLEMENTED" and exchange.method.startswith("/rollout_buffer.")
        said = error.message if error is not None else "there is no such method"
        finding.expect(not (bad or unknown), f"{exchange} was refused: {said}")


def goes_on(record: Record, finding: Finding) -> None:
    """Rule: every scenario came to its end in time."""
    stuck = {mark.data["name"]: mark.data["why"] for mark in record.marked("stuck")}
    for mark in record.marked("scenario"):
        name = mark.data["name"]
        finding.expect(name not in stuck, f"scenario {name!r}: {stuck.get(name)}")


def asked_again(
    record: Record,
    finding: Finding,
    exchanges: Iterable[Exchange],
    identity: Callable[[Exchange], Hashable],
    content: Callable[[Exchange], bytes],
    *,
    of_one_kind: Callable[[Exchange], Hashable],
    said: str,
) -> None:
    """Calls that got no answer are asked again under their identity, with the same content, before the next one.

    Judged are identities of which a call got no answer. `of_one_kind`: what is called one after the other, never at
    once. `said`: what a repeat has to be, for the violation.
    """
    calls = list(exchanges)
    for same in grouped(calls, identity):
        if not any(call.unanswered for call in same):
            continue
        first, last = same[0], same[-1]
        finding.exercised += 1
        changed = next((call for call in same if content(call) != content(first)), None)
        if changed is not None:
            finding.violations.append(f"{changed} repeats {first}, which got no answer, but is not {said}")
        if not last.unanswered:
            continue
        why = f"{last} got no answer ({last.fault or last.status}) and was not asked again"
        then = next((c for c in calls if c.began_s > last.ended_s and of_one_kind(c) == of_one_kind(last)), None)
        if then is not None and not _restarted(record, last, then):
            finding.violations.append(f"{why}; {then} came next")
        elif then is None and _went_on(record, last):
            finding.violations.append(why)


def _went_on(record: Record, call: Exchange) -> bool:
    """True when the candidate had the time to ask again."""
    had_time = record.ended_s > call.ended_s + ASKED_AGAIN_S
    return had_time and not ends_within(record, call.ended_s, ASKED_AGAIN_S)


def _restarted(record: Record, before: Exchange, after: Exchange) -> bool:
    return any(before.began_s < mark.at_s <= after.began_s for mark in record.marked("start"))


def paced(finding: Finding, streams: Iterable[list[Exchange]], fruitless: Callable[[Exchange], bool]) -> None:
    """Rule of pace: after calls that brought nothing, no more than MOST_IN_A_SECOND follow within a second."""
    for calls in streams:
        after = [b for a, b in pairwise(calls) if fruitless(a)]
        finding.exercised += len(after)
        for i in range(len(after) - MOST_IN_A_SECOND):
            burst = after[i : i + MOST_IN_A_SECOND + 1]
            if burst[-1].began_s - burst[0].began_s < 1.0:
                finding.violations.append(
                    f"{burst[0]} is the first of more than {MOST_IN_A_SECOND} within a second, each after one that "
                    "brought nothing"
                )
                break


def grouped(exchanges: Iterable[Exchange], key: Callable[[Exchange], Hashable]) -> list[list[Exchange]]:
    """Calls of the same key together, in order."""
    found: dict[Hashable, list[Exchange]] = {}
    for exchange in exchanges:
        found.setdefault(key(exchange), []).append(exchange)
    return list(found.values())
