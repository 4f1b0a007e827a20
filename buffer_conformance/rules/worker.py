"""Rules for a worker: its leases, its heartbeats, its identity, and its end."""

from itertools import pairwise

from buffer_conformance.record import Exchange, Record
from buffer_conformance.rules.groups import has_form, is_of_its_task, is_pushed_again, states_loaded_versions
from buffer_conformance.rules.rule import Finding, Rule, rule
from buffer_conformance.rules.shared import (
    SETTLING_S,
    asked_again,
    goes_on,
    grouped,
    paced,
    seen_revision,
    well_formed,
)
from buffer_conformance.rules.views import disturbed, extensions, leases, pushes, reports, stamp, without_run
from rollout_buffer.v1 import weights_pb2

REPORT_SETTLING_S = 3.0
"""A lease request and the report of what is loaded may pass each other for so long."""

LOADED_WITHIN_S = 60.0
EXIT_WITHIN_S = 60.0
_TTL_SLACK = 1.1


def _asker(exchange: Exchange) -> tuple[str, str, int]:
    """Process and sink of a request; those for the two sinks are remembered apart."""
    request = exchange.request
    return request.worker_id, request.instance_id, request.sink


def _identity(exchange: Exchange) -> tuple[str, str, int, str]:
    return *_asker(exchange), exchange.request.request_id


@rule("W1", "A lease request that got no answer is asked again under its request id.", "Leases")
def _lease_repeats(record: Record, finding: Finding) -> None:
    calls = list(record.of("LeaseTasks"))
    # A worker that stops may ask for less: it only wants to know what it was granted.
    asked_again(
        record,
        finding,
        calls,
        _identity,
        lambda call: without_run(call, "max_tasks", "wait_ms"),
        of_one_kind=_asker,
        said="the same request (only seen_revision, and a smaller max_tasks or wait_ms, may differ)",
    )


@rule("W3", "Every lease ends exactly once: pushed, returned or lost.", "Leases")
def _ends_once(record: Record, finding: Finding) -> None:
    """Leases held at SIGTERM are a matter of W10, groups pushed without an answer one of W6."""
    tried = {push.lease_id: push for push in pushes(record)}
    terms, now = [mark.at_s for mark in record.marked("sigterm")], record.ended_s
    for lease_id, held in leases(record).items():
        push = tried.get(lease_id)
        unanswered = push is not None and push.ack is None
        if not (held.is_live(now) or any(held.is_live(at) for at in terms) or unanswered):
            finding.expect(
                bool(held.ends),
                f"lease {lease_id}, granted at {held.granted_s:.1f} s, never ended: its group has no final answer, it "
                "was not returned, and not lost",
            )
        acts = sorted(end for end in held.ends if end[2] != "lost")
        for first, second in pairwise(acts):
            # A repeat of a call whose answer was lost is no second end: that one was not delivered.
            if second[0] > first[1] and first[3] is not second[3]:
                finding.violations.append(
                    f"lease {lease_id} was {first[2]} in {first[3]}, and {second[2]} in {second[3]}"
                )


@rule("W4", "A lease that is held gets a heartbeat within its time to live.", "Leases")
def _heartbeats(record: Record, finding: Finding) -> None:
    for lease_id, held in leases(record).items():
        ttl_s = held.lease.ttl_ms / 1000
        times = [held.granted_s, *sorted(t for t in held.renewed if held.granted_s <= t < held.ended_s)]
        # One that never ended, and was given up, is a matter of W3 and W6.
        end = [held.ended_s] if held.ends else []
        for since, until in pairwise([*times, *end]):
            if disturbed(record, since, until):
                continue
            if len(times) > 1 or until - since > ttl_s:
                finding.expect(
                    until - since <= ttl_s * _TTL_SLACK,
                    f"lease {lease_id} lives {ttl_s:.1f} s and had no heartbeat from {since:.1f} to {until:.1f} s",
                )


@rule("W7", "Lease requests name the version that the engine was last reported with.", "Numbering")
def _loaded_as_reported(record: Record, finding: Finding) -> None:
    reported = reports(record)
    seen: set[tuple[str, str, int, str]] = set()
    for call in record.of("LeaseTasks"):
        if _identity(call) in seen:
            continue
        seen.add(_identity(call))
        around = call.began_s - REPORT_SETTLING_S, call.began_s + REPORT_SETTLING_S
        if disturbed(record, *around) or around[1] > record.ended_s:
            continue
        engine, loaded = call.request.engine_id, stamp(call.request.loaded)
        said = [(exchange.began_s, stamp(report.loaded)) for exchange, report in reported.get(engine, ())]
        old = [version for at, version in said if at <= call.began_s - SETTLING_S][-1:]
        near = [v for at, v in said if call.began_s - SETTLING_S < at <= call.began_s + REPORT_SETTLING_S]
        finding.expect(
            loaded in [*old, *near],
            f"{call} says that engine {engine!r} has loaded {loaded}; it was last reported with "
            f"{[*old, *near][-1:] or 'nothing'}",
        )


@rule(
    "W8",
    f"After a publish every engine reports the version, or an error, within {LOADED_WITHIN_S:.0f} s.",
    "Weight updates",
)
def _loads_what_is_published(record: Record, finding: Finding) -> None:
    ends = [mark.at_s for mark in record.marks if mark.kind in ("sigterm", "exit")]
    over = min(ends, default=float("inf"))
    out = (weights_pb2.ENGINE_STATE_STOPPED, weights_pb2.ENGINE_STATE_QUARANTINED)
    for mark in record.marked("published"):
        wanted = (mark.data["term"], mark.data["version"])
        for engine, said in reports(record).items():
            before = [report for exchange, report in said if exchange.began_s <= mark.at_s]
            if not before or before[-1].state in out:
                continue
            in_time = min(mark.at_s + LOADED_WITHIN_S, over)
            after = [report for exchange, report in said if mark.at_s < exchange.began_s <= in_time]
            done = any(stamp(report.loaded) >= wanted or report.errors > before[-1].errors for report in after)
            finding.expect(
                done or stamp(before[-1].loaded) >= wanted,
                f"engine {engine!r} reported neither version {wanted}, published at {mark.at_s:.1f} s, nor an error "
                f"by {in_time:.1f} s",
            )


@rule("W9", "Of a lost lease nothing is said any more; a finished group may be pushed.", "Leases")
def _nothing_for_a_lost_lease(record: Record, finding: Finding) -> None:
    named = [(call, list(request.lease_ids)) for call, request, _ in extensions(record)]
    named += [(call, [back.lease_id for back in call.request.returns]) for call in record.of("ReturnLeases")]
    for lease_id, held in leases(record).items():
        lost = held.lost_s
        if lost == float("inf"):
            continue
        finding.exercised += 1
        for call, lease_ids in named:
            if call.began_s > lost + SETTLING_S and lease_id in lease_ids:
                finding.violations.append(f"{call} is about lease {lease_id}, known to be lost since {lost:.1f} s")


@rule("W10", "On SIGTERM leases end, engines are reported STOPPED, and the exit code is 0.", "Leases")
def _ends_in_order(record: Record, finding: Finding) -> None:
    exits = record.marked("exit")
    for term in record.marked("sigterm"):
        ended = next((mark for mark in exits if mark.at_s >= term.at_s), None)
        code = ended.data["code"] if ended is not None else None
        finding.expect(
            ended is not None and code == 0,
            f"after SIGTERM at {term.at_s:.1f} s it "
            + ("did not end in time" if code is None else f"ended with exit code {code}"),
        )
        gone = ended.at_s if ended is not None else record.ended_s
        for lease_id, held in leases(record).items():
            if held.is_live(term.at_s) or held.granted_s > term.at_s:
                finding.expect(held.ended_s <= gone, f"lease {lease_id} was still held when it ended at {gone:.1f} s")
        for engine, said in reports(record).items():
            last = [report for exchange, report in said if exchange.began_s <= gone][-1:]
            finding.expect(
                bool(last) and last[0].state == weights_pb2.ENGINE_STATE_STOPPED,
                f"the last report of engine {engine!r} does not say STOPPED",
            )


@rule("W13", "Lease requests that bring nothing are not repeated in a hurry.", "Fine print")
def _lease_pace(record: Record, finding: Finding) -> None:
    calls = grouped(record.of("LeaseTasks"), _asker)
    paced(finding, calls, lambda call: call.reply is None or not call.reply.leases)


@rule("W14", "One instance id a process, one request id a request, bundles numbered from 1.", "Leases")
def _identities(record: Record, finding: Finding) -> None:
    answered: dict[tuple[str, str, int, str], Exchange] = {}
    terms = [mark.at_s for mark in record.marked("sigterm")]
    instances: dict[str, str] = {}
    for call in record.of("LeaseTasks"):
        worker, instance, _, request_id = key = _identity(call)
        finding.expect(
            instances.setdefault(worker, instance) == instance,
            f"{call}: worker {worker!r} is instance {instance!r}, and was {instances[worker]!r} in the same process",
        )
        stopping = any(at <= call.began_s for at in terms)
        if key in answered and not stopping:
            finding.violations.append(
                f"{call} uses request id {request_id!r} again, which {answered[key]} had answered"
            )
        if call.reply is not None:
            answered.setdefault(key, call)
    for call in record.of("PushGroups"):
        numbers = [entry.message.sequence for entry in call.requests if entry.message is not None]
        finding.expect(
            numbers == list(range(1, len(numbers) + 1)),
            f"{call} numbers its bundles {numbers[:5]}, not 1, 2, 3 and so on",
        )


WORKER_RULES = (
    _lease_repeats,
    Rule("W2", "seen_revision is the highest revision received, with its proof.", "What is promised", seen_revision),
    _ends_once,
    _heartbeats,
    has_form,
    is_pushed_again,
    _loaded_as_reported,
    _loads_what_is_published,
    _nothing_for_a_lost_lease,
    _ends_in_order,
    is_of_its_task,
    states_loaded_versions,
    _lease_pace,
    _identities,
    Rule("W15", "No request is refused for its form.", "What is promised", well_formed),
    Rule("W16", "Work goes on after every fault.", "What is promised", goes_on),
)
"""Rules for workers; docs/conformance.md lists them."""
