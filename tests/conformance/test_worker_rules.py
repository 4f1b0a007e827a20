"""Each rule for workers is broken, alone, by a record that shows its defect; our worker's own record breaks none."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from buffer_conformance.played.groups import made_group
from buffer_conformance.record import Exchange, Mark, Record
from buffer_conformance.rules.groups import task_fault
from buffer_conformance.rules.rule import Outcome, judged
from buffer_conformance.rules.views import Push, extensions, leases, pushes
from buffer_conformance.rules.worker import WORKER_RULES
from rollout_buffer.v1 import common_pb2, groups_pb2, tasks_pb2, weights_pb2
from tests.conformance.falsify import after, calls, change, change_groups, remember

LOST = "the reply was lost"


def broken(record: Record) -> dict[str, list[str]]:
    return {v.rule.id: list(v.violations) for v in judged(WORKER_RULES, record) if v.outcome is Outcome.FAILED}


def test_our_worker_breaks_no_rule_and_exercises_every_one(of_our_worker: Record) -> None:
    verdicts = judged(WORKER_RULES, of_our_worker)
    assert {v.rule.id: (str(v.outcome), v.violations) for v in verdicts} == {
        rule.id: ("passed", ()) for rule in WORKER_RULES
    }


def test_groups_that_lie_in_the_store_are_judged_by_their_headers(worker_record: Record) -> None:
    def moved(group: groups_pb2.Group) -> None:
        group.ClearField("payload")
        group.stored.nonce = bytes(16)

    change_groups(worker_record, moved, lambda _: True)
    assert broken(worker_record) == {}
    change_groups(worker_record, lambda group: setattr(group.header.samples[0], "tokens", 0), lambda _: True)
    assert "W5" in broken(worker_record)


def answered_once(record: Record) -> str:
    """A lease whose group was pushed once, and queued."""
    tries: dict[str, list[Push]] = {}
    for push in pushes(record):
        tries.setdefault(push.lease_id, []).append(push)
    return next(lease_id for lease_id, found in tries.items() if len(found) == 1 and found[0].is_final)


def asks_anew(record: Record) -> None:
    lost = calls(record, "LeaseTasks", lambda call: call.fault == LOST)[0]
    repeat = calls(record, "LeaseTasks", lambda call: call.began_s > lost.began_s)[0]
    change(repeat, request_id="another")


def reports_in(exchange: Exchange) -> list[weights_pb2.EngineReport]:
    """Reports of an exchange, to be changed."""
    request = exchange.requests[0].message
    return [each.report for each in ([request] if exchange.method == "ReportEngine" else request.reports)]


def asks_for_another_engine(record: Record) -> None:
    lost = calls(record, "LeaseTasks", lambda call: call.fault == LOST)[0]
    repeat = calls(record, "LeaseTasks", lambda call: call.began_s > lost.began_s)[0]
    change(repeat, engine_id="another")
    for reported in [*calls(record, "ReportEngine"), *calls(record, "Heartbeat")]:
        also = after(record, reported.began_s, reported)
        for report in reports_in(also):
            report.engine_id = "another"
        change(also)


def forgets_the_revision(record: Record) -> None:
    call = calls(record, "LeaseTasks")[-1]
    call.requests[0].message.run.seen_revision = 1
    change(call)


def invents_a_revision(record: Record) -> None:
    call = calls(record, "LeaseTasks")[-1]
    call.requests[0].message.run.seen_revision += 1_000_000
    change(call)


def loses_the_proof(record: Record) -> None:
    call = calls(record, "LeaseTasks")[-1]
    call.requests[0].message.run.ClearField("seen_proof")
    change(call)


def returns_what_it_has_pushed(record: Record) -> None:
    lease_id = answered_once(record)
    end = leases(record)[lease_id].ended_s
    back = after(record, end + 0.1, calls(record, "ReturnLeases")[0])
    back.requests[0].message.returns[0].lease_id = lease_id
    back.requests[0].message.returns[0].ClearField("partial_rollout")
    change(back)


def forgets_a_lease(record: Record) -> None:
    lease_id = answered_once(record)
    for exchange in record.of("PushGroups"):
        for entry in exchange.replies:
            sent = next(e.message for e in exchange.requests if e.message.sequence == entry.message.sequence)
            for group, ack in zip(sent.groups, entry.message.acks, strict=True):
                if group.header.lease_id == lease_id:
                    ack.outcome = groups_pb2.PUSH_OUTCOME_REJECTED_FULL


def sends_no_heartbeats(record: Record) -> None:
    record.exchanges = [exchange for exchange in record.exchanges if exchange.method != "ExtendLeases"]
    for exchange in record.of("Heartbeat"):
        exchange.requests[0].message.ClearField("extensions")
    remember(record)


def with_group(how: Callable[[groups_pb2.Group], None]) -> Callable[[Record], None]:
    def falsify(record: Record) -> None:
        lease_id = answered_once(record)
        change_groups(record, how, lambda found: found == lease_id)

    return falsify


def column(group: groups_pb2.Group, index: int) -> tuple[int, int]:
    """Offset and rows of one of the first three columns, of 4, 4 and 1 bytes a row."""
    rows = sum(sample.tokens for sample in group.header.samples)
    aligned = (4 * rows + 7) // 8 * 8
    return aligned * index, rows


def set_bytes(group: groups_pb2.Group, at: int, value: bytes) -> None:
    group.payload = group.payload[:at] + value + group.payload[at + len(value) :]


def logprob_in_the_prompt(group: groups_pb2.Group) -> None:
    set_bytes(group, column(group, 1)[0], np.float32(-0.5).tobytes())


def masked_prompt(group: groups_pb2.Group) -> None:
    set_bytes(group, column(group, 2)[0], b"\x01")


def short_payload(group: groups_pb2.Group) -> None:
    group.payload = group.payload[:-1]


def gap_in_the_spans(group: groups_pb2.Group) -> None:
    group.header.samples[0].spans[0].start += 1


def another_prompt(group: groups_pb2.Group) -> None:
    set_bytes(group, column(group, 0)[0], np.int32(999).tobytes())


def one_trajectory(group: groups_pb2.Group) -> None:
    for sample in group.header.samples:
        sample.trajectory = 1


def no_metadata(group: groups_pb2.Group) -> None:
    group.header.metadata_json = ""


def version_from_nowhere(group: groups_pb2.Group) -> None:
    for sample in group.header.samples:
        for span in sample.spans:
            span.version.version = 77


def unanswered_push(record: Record) -> Push:
    return next(p for p in pushes(record) if p.ack is None and p.exchange.fault == LOST)


def pushes_another_group_again(record: Record) -> None:
    first = unanswered_push(record)
    for exchange in record.of("PushGroups"):
        for entry in exchange.requests:
            for group in entry.message.groups:
                if group.header.lease_id == first.lease_id and exchange is not first.exchange:
                    group.header.samples[0].reward += 1
            entry.raw = entry.message.SerializeToString()


def pushes_nothing_again(record: Record) -> None:
    first = unanswered_push(record)
    for exchange in record.of("PushGroups"):
        for entry in exchange.requests if exchange is not first.exchange else ():
            kept = [group for group in entry.message.groups if group.header.lease_id != first.lease_id]
            answers = [e.message for e in exchange.replies if e.message.sequence == entry.message.sequence]
            for answer in answers if len(kept) < len(entry.message.groups) else ():
                at = [group.header.lease_id for group in entry.message.groups].index(first.lease_id)
                del answer.acks[at]
            del entry.message.groups[:]
            entry.message.groups.extend(kept)
            entry.raw = entry.message.SerializeToString()
    # A slow worker's next heartbeat may have been told that the lease, whose group had come, is over.
    for _, request, reply in extensions(record):
        for at, lease_id in enumerate(request.lease_ids):
            if reply is not None and lease_id == first.lease_id:
                reply.states[at] = tasks_pb2.LEASE_STATE_LIVE


def names_another_version(record: Record) -> None:
    (lost_lease,) = (mark for mark in record.marked("scenario") if mark.data["name"] == "lost lease")
    answered = calls(record, "LeaseTasks", lambda call: call.began_s >= lost_lease.at_s)
    change(answered[0], loaded=common_pb2.WeightVersion(term=2, version=50))


def never_loads_the_last_version(record: Record) -> None:
    newest, older = (record.marked("published")[i].data["version"] for i in (-1, -2))

    def stay(version: common_pb2.WeightVersion) -> None:
        version.version = older if version.version == newest else version.version

    for exchange in record.of("ReportEngine"):
        stay(exchange.request.report.loaded)
    for exchange in record.of("LeaseTasks"):
        stay(exchange.request.loaded)

    def group(found: groups_pb2.Group) -> None:
        for sample in found.header.samples:
            for span in sample.spans:
                stay(span.version)

    change_groups(record, group, lambda _: True)


def lost_lease(record: Record) -> tuple[str, float]:
    return next((i, held.lost_s) for i, held in leases(record).items() if held.lost_s < float("inf"))


def keeps_a_lost_lease(record: Record) -> None:
    lease_id, lost_s = lost_lease(record)
    beat = after(record, lost_s + 2.0, calls(record, "ExtendLeases")[0])
    del beat.requests[0].message.lease_ids[:]
    beat.requests[0].message.lease_ids.append(lease_id)
    beat.replies[0].message.states[:] = [tasks_pb2.LEASE_STATE_LOST]
    change(beat)


def with_exit_code(record: Record) -> None:
    record.marks = [Mark(m.at_s, m.kind, {"code": 3}) if m.kind == "exit" else m for m in record.marks]


def never_says_stopped(record: Record) -> None:
    for exchange in record.of("ReportEngine", "Heartbeat"):
        for report in reports_in(exchange):
            if report.state == weights_pb2.ENGINE_STATE_STOPPED:
                report.state = weights_pb2.ENGINE_STATE_READY


def keeps_leases_at_its_end(record: Record) -> None:
    at = record.marked("sigterm")[0].at_s
    record.exchanges = [e for e in record.exchanges if e.method != "ReturnLeases" and not _is_push_after(e, at)]
    remember(record)


def _is_push_after(exchange: Exchange, at_s: float) -> bool:
    exchange.replies = [e for e in exchange.replies if exchange.method != "PushGroups" or e.at_s < at_s]
    return exchange.method == "PushGroups" and exchange.began_s > at_s


def asks_in_a_hurry(record: Record) -> None:
    empty = calls(record, "LeaseTasks", _is_held_back)[-1]
    newest = [r.request.report.loaded for r in record.of("ReportEngine") if r.began_s < empty.replied_s][-1]
    for i in range(40):
        again = after(record, empty.replied_s + 0.01 * (i + 1), empty)
        again.replies[0].at_s = again.ended_s = again.began_s
        change(again, request_id=f"hurry{i}", loaded=newest)


def _is_held_back(call: Exchange) -> bool:
    return call.reply is not None and call.reply.wait == tasks_pb2.LEASE_WAIT_PAUSED


def changes_its_instance(record: Record) -> None:
    change(calls(record, "LeaseTasks", lambda call: call.reply is not None)[2], instance_id="another")


def uses_a_request_id_twice(record: Record) -> None:
    answered = calls(record, "LeaseTasks", lambda call: call.reply is not None)
    change(answered[2], request_id=answered[1].request.request_id)


def miscounts_its_bundles(record: Record) -> None:
    stream = calls(record, "PushGroups", lambda call: len(call.requests) > 1)[0]
    stream.requests[1].message.sequence += 5
    stream.replies[1].message.sequence += 5
    stream.requests[1].raw = stream.requests[1].message.SerializeToString()


def is_refused(record: Record) -> None:
    report = calls(record, "ReportEngine")[1]
    again = after(record, report.began_s, report)
    again.status, again.replies = "INVALID_ARGUMENT", []
    again.error = common_pb2.ErrorDetail(reason="invalid_field", message="worker_id is ''")


def gets_stuck(record: Record) -> None:
    record.mark("stuck", name="plain work", why="waited in vain for the groups of 6 tasks")


DEFECTS = (
    ("W1", asks_anew),
    ("W1", asks_for_another_engine),
    ("W2", forgets_the_revision),
    ("W2", invents_a_revision),
    ("W2", loses_the_proof),
    ("W3", returns_what_it_has_pushed),
    ("W3", forgets_a_lease),
    ("W4", sends_no_heartbeats),
    ("W5", with_group(logprob_in_the_prompt)),
    ("W5", with_group(masked_prompt)),
    ("W5", with_group(short_payload)),
    ("W5", with_group(gap_in_the_spans)),
    ("W6", pushes_another_group_again),
    ("W6", pushes_nothing_again),
    ("W7", names_another_version),
    ("W8", never_loads_the_last_version),
    ("W9", keeps_a_lost_lease),
    ("W10", with_exit_code),
    ("W10", never_says_stopped),
    ("W10", keeps_leases_at_its_end),
    ("W11", with_group(another_prompt)),
    ("W11", with_group(no_metadata)),
    ("W11", with_group(one_trajectory)),
    ("W12", with_group(version_from_nowhere)),
    ("W13", asks_in_a_hurry),
    ("W14", changes_its_instance),
    ("W14", uses_a_request_id_twice),
    ("W14", miscounts_its_bundles),
    ("W15", is_refused),
    ("W16", gets_stuck),
)


@pytest.mark.parametrize(("rule", "defect"), DEFECTS)
def test_a_defect_breaks_its_rule_alone(rule: str, defect: Callable[[Record], None], worker_record: Record) -> None:
    defect(worker_record)
    found = broken(worker_record)
    assert set(found) == {rule}, found


def test_every_rule_has_a_defect() -> None:
    assert {rule for rule, _ in DEFECTS} == {rule.id for rule in WORKER_RULES}


def test_further_rows_of_a_trajectory_count_once_and_bring_prompts_of_their_own() -> None:
    task = tasks_pb2.Task(task_id="t", prompt_token_ids=[5, 6], group_size=2)
    task.sampling.max_new_tokens = 8
    lease = tasks_pb2.Lease(lease_id="t/0/1", task=task, attempt=1)
    group = made_group(lease, common_pb2.WeightVersion(term=1))
    one_trajectory(group)
    set_bytes(group, 4 * group.header.samples[0].tokens, np.int32(999).tobytes())
    held: Any = SimpleNamespace(lease=lease)
    assert "number of trajectories is 1, the task's is 2" in task_fault(group, held, partial=False)
    lease.task.group_size = 1
    assert task_fault(group, held, partial=False) == ""
    another_prompt(group)
    assert "sample 0 begins with tokens [999, 6]" in task_fault(group, held, partial=False)


def test_a_group_names_the_images_of_its_task_and_their_hashes() -> None:
    task = tasks_pb2.Task(task_id="t", prompt_token_ids=[5, 6], group_size=2)
    task.sampling.max_new_tokens = 8
    task.images.add(location="a.png", tokens=1)
    task.images.add(sha256="1" * 64, start=1, tokens=1)
    lease = tasks_pb2.Lease(lease_id="t/0/1", task=task, attempt=1)
    group, held = made_group(lease, common_pb2.WeightVersion(term=1)), SimpleNamespace(lease=lease)
    assert "it has 0 images" in task_fault(group, held, partial=False)  # type: ignore[arg-type]
    group.header.images.add(sha256="2" * 64, location="a.png", tokens=1)
    group.header.images.add(sha256="1" * 64, start=1, tokens=1)
    assert task_fault(group, held, partial=True) == ""  # type: ignore[arg-type]
    group.header.images[1].sha256 = "2" * 64
    assert "others" in task_fault(group, held, partial=True)  # type: ignore[arg-type]
