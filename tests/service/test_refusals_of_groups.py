"""Bad groups: each is refused with a reason and the facts behind it, and nothing is written."""

from collections.abc import Callable

import pytest

from rollout_buffer.v1 import groups_pb2
from tests.support.rpc import TIMEOUT_S, Rpc, RunRpc, connect, failure, make_group, make_task, streamed
from tests.support.service import ServiceProcess


def _broken(change: Callable[[groups_pb2.Group], None]) -> groups_pb2.Group:
    group = make_group("x")
    change(group)
    return group


def _wrong_dtype(group: groups_pb2.Group) -> None:
    group.header.columns[1].dtype = groups_pb2.D_TYPE_FLOAT64


def _too_short(group: groups_pb2.Group) -> None:
    group.payload = group.payload[:-1]


def _empty(group: groups_pb2.Group) -> None:
    del group.header.samples[:]


def _unfinished(group: groups_pb2.Group) -> None:
    group.header.samples[1].finish_reason = groups_pb2.FINISH_REASON_ABORTED


def _endless_reward(group: groups_pb2.Group) -> None:
    group.header.samples[0].reward = float("inf")


def _gap_in_spans(group: groups_pb2.Group) -> None:
    group.header.samples[0].spans[0].start = 2


def _huge_header(group: groups_pb2.Group) -> None:
    group.header.samples[0].turns.extend([groups_pb2.Turn(role="r" * 4_000, start=0, end=1)] * 300)


def _first_revision_beyond_numbers(group: groups_pb2.Group) -> None:
    group.header.first_revision = 1 << 53


def _version_of_no_stage(group: groups_pb2.Group) -> None:
    group.header.stage_version = 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_wrong_dtype, "columns[1].dtype"),
        (_too_short, "payload"),
        (_empty, "samples"),
        (_unfinished, "samples[1].finish_reason"),
        (_endless_reward, "samples[0].reward"),
        (_gap_in_spans, "samples[0].spans[0]"),
        (_huge_header, "header"),
        (_first_revision_beyond_numbers, "first_revision"),
        (_version_of_no_stage, "stage_version"),
    ],
)
def test_a_bad_group_names_its_field(rpc: Rpc, change: Callable[[groups_pb2.Group], None], field: str) -> None:
    run = rpc.create(batch_groups=1)
    group = _broken(change)
    before = run.get()
    for ack in (*run.push([group]), run.push_one(group)):
        assert ack.outcome == groups_pb2.PUSH_OUTCOME_INVALID
        assert ack.error.reason == "invalid_field"
        assert ack.error.attributes["field"] == field
        assert ack.error.attributes["limit"]
    assert run.get() == before


def test_an_unknown_lease_is_named_and_nothing_is_queued(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1)
    run.submit([make_task("a")])
    before = run.get()
    for task_id, lease_id in (("a", "a/0/1"), ("zz", "zz/0/1")):
        ack = run.push_one(make_group(task_id, lease_id=lease_id))
        assert ack.outcome == groups_pb2.PUSH_OUTCOME_INVALID
        assert ack.error.reason == "unknown_lease"
        assert ack.error.attributes["lease_id"] == lease_id
    ack = run.push_one(make_group("a", lease_id="not a lease"))
    assert (ack.error.reason, ack.error.attributes["field"]) == ("invalid_field", "lease_id")
    assert run.get() == before


def test_a_group_above_the_queues_byte_cap_is_refused_at_once(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1, max_queued_bytes=1 << 20)
    before = run.get()
    ack = run.push_one(make_group("x", lengths=(150_000,)))
    assert (ack.error.reason, ack.error.attributes["field"]) == ("invalid_field", "payload")
    assert run.get() == before


def test_a_payload_above_the_services_limit_is_refused(service: ServiceProcess, rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1)
    before = run.get()
    limit = 64 << 20
    group = make_group("x")
    group.payload = bytes(limit + 1)
    generous = connect(service.address)
    try:
        ack = RunRpc(generous, run.run_id).push_one(group)
        assert (ack.error.reason, ack.error.attributes["field"]) == ("invalid_field", "payload")
        assert str(limit) in ack.error.attributes["limit"]
    finally:
        generous.channel.close()
    assert run.get() == before


def test_a_bundle_that_is_malformed_ends_the_stream_after_what_was_good(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=2)
    good = groups_pb2.PushGroupsRequest(run=run.ref, sequence=1, groups=[make_group("x0")])
    late = groups_pb2.PushGroupsRequest(run=run.ref, sequence=3, groups=[make_group("x1")])
    replies = streamed(rpc.groups.PushGroups(iter([good, late]), timeout=TIMEOUT_S))
    assert next(replies).acks[0].outcome == groups_pb2.PUSH_OUTCOME_QUEUED
    error = failure(lambda: next(replies))
    assert (error.reason, error.attributes["field"]) == ("invalid_field", "sequence")
    assert run.get().groups.accepted.groups == 1


@pytest.mark.parametrize("method", ["GroupService/PushGroup", "BatchService/PullBatch"])
def test_bytes_that_are_no_message_are_refused(rpc: Rpc, method: str) -> None:
    if method.endswith("PullBatch"):
        error = failure(lambda: list(rpc.channel.unary_stream(f"/rollout_buffer.v1.{method}")(b"\xff\xff", timeout=9)))
    else:
        error = failure(lambda: rpc.channel.unary_unary(f"/rollout_buffer.v1.{method}")(b"\xff\xff", timeout=9))
    assert (error.reason, error.attributes["field"]) == ("invalid_field", "message")


def test_a_push_bundle_of_bytes_that_are_no_message_is_refused(rpc: Rpc) -> None:
    push = rpc.channel.stream_stream("/rollout_buffer.v1.GroupService/PushGroups")
    error = failure(lambda: list(push(iter([b"\xff\xff"]), timeout=9)))
    assert (error.reason, error.attributes["field"]) == ("invalid_field", "message")
