"""Pushes of groups that their pushers have written to the store themselves."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from buffer_wire.payloads.keys import new_nonce
from rollout_buffer.v1 import groups_pb2, inspect_pb2, tasks_pb2
from tests.service.test_blocked_pushes import BLOCK, Pusher, blocked
from tests.support.rpc import TIMEOUT_S, Rpc, connect, failure, make_group, make_task
from tests.support.service import ServiceProcess, running_service
from tests.support.store_server import StoreServer, store_server
from tests.support.written import claim_check, key_of, write

QUEUED, MISSING = groups_pb2.PUSH_OUTCOME_QUEUED, groups_pb2.PUSH_OUTCOME_PAYLOAD_MISSING


@pytest.fixture(scope="module")
def store() -> Iterator[StoreServer]:
    with store_server() as server:
        yield server


@pytest.fixture(scope="module")
def service(store: StoreServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running_service(tmp_path_factory.mktemp("service"), store=store.url) as running:
        yield running


@pytest.fixture(scope="module")
def rpc(service: ServiceProcess) -> Iterator[Rpc]:
    client = connect(service.address)
    yield client
    client.channel.close()


@pytest.fixture(scope="module")
def stored(store: StoreServer) -> Iterator[Any]:
    """A plain client of the store."""
    with redis.Redis(unix_socket_path=str(store.socket)) as client:
        yield client


def test_written_and_relayed_groups_of_one_bundle_are_pulled_as_they_were_made(
    rpc: Rpc, stored: Any, service: ServiceProcess
) -> None:
    name = "rollout_buffer_direct_bytes_total"
    before = service.metric(name, method="PushGroups")
    run = rpc.create(batch_groups=4)
    groups = [make_group(f"x{i}", lengths=(1_000 * (i + 1), 7), seed=i) for i in range(4)]
    pushed = [write(stored, run.run_id, group) if i % 2 else group for i, group in enumerate(groups)]
    acks = run.push(pushed)
    assert [ack.outcome for ack in acks] == [QUEUED] * 4
    assert [item.group for item in run.pull(0)[1]] == groups
    service.until_metric(before + sum(groups[i].ByteSize() for i in (1, 3)), name, method="PushGroups")
    # Some time later, over the other call.
    request = groups_pb2.PushGroupRequest(run=run.ref, group=pushed[1])
    assert rpc.groups.PushGroup(request, timeout=TIMEOUT_S).ack == acks[1]
    assert run.get().groups.accepted.groups == 4


def test_a_header_that_is_not_the_one_in_the_store_is_not_accepted(rpc: Rpc, stored: Any) -> None:
    run = rpc.create(batch_groups=1)
    pushed = write(stored, run.run_id, make_group("a"))
    pushed.header.samples[0].reward += 1
    assert [ack.outcome for ack in run.push([pushed])] == [MISSING]
    assert run.get().groups.accepted.groups == 0


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("stored.nonce", lambda group: group.stored.ClearField("nonce")),
        ("stored.nonce", lambda group: setattr(group.stored, "nonce", bytes(17))),
        ("payload", lambda group: setattr(group, "payload", b"both")),
    ],
)
def test_what_contradicts_itself_is_refused(rpc: Rpc, field: str, change: Any) -> None:
    run = rpc.create(batch_groups=1)
    pushed = claim_check(make_group("a"))
    change(pushed)
    (ack,) = run.push([pushed])
    assert (ack.outcome, ack.error.attributes["field"]) == (groups_pb2.PUSH_OUTCOME_INVALID, field)


def test_the_limit_of_payloads_holds_for_what_is_written(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1)
    pushed = claim_check(make_group("a"))
    pushed.header.columns.add(
        name="vast", dtype=groups_pb2.D_TYPE_UINT8, axis=groups_pb2.AXIS_TOKEN, item_shape=[1 << 30]
    )
    (ack,) = run.push([pushed])
    assert ack.error.attributes["field"] == "payload"
    assert ack.error.attributes["limit"] == "at most 67108864 bytes (max_message_bytes); in parts, 536870912"


def test_a_partial_rollout_has_its_payload_with_it(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1)
    run.submit([make_task("a")])
    lease = run.lease().leases[0]
    made = make_group("a", lease_id=lease.lease_id)
    made.stored.nonce = new_nonce()
    back = tasks_pb2.LeaseReturn(lease_id=lease.lease_id, kind=tasks_pb2.RETURN_KIND_INTERRUPTED, partial_rollout=made)
    request = tasks_pb2.ReturnLeasesRequest(
        run=run.ref, worker_id=run.worker_id, instance_id=run.instance_id, returns=[back]
    )
    error = failure(lambda: rpc.tasks.ReturnLeases(request, timeout=TIMEOUT_S))
    assert error.attributes["field"] == "returns[0].partial_rollout.stored"


def test_a_group_that_is_not_what_its_key_says_is_shown_to_nobody_and_is_lost(rpc: Rpc, stored: Any) -> None:
    run = rpc.create(batch_groups=2)
    run.fill(1)
    group = make_group("a")
    pushed = claim_check(group)
    stored.set(key_of(run.run_id, group, pushed), b"\xff" * group.ByteSize(), px=600_000)
    assert [ack.outcome for ack in run.push([pushed])] == [QUEUED]
    shown = inspect_pb2.GetGroupRequest(run=run.ref, group_id="a/0", include_samples=True)
    assert failure(lambda: rpc.inspect.GetGroup(shown, timeout=TIMEOUT_S)).reason == "unknown_group"
    assert [item.group.header.task_id for item in run.pull(0)[1]] == ["x0"]
    assert run.get().groups.lost.groups == 1


def test_a_blocked_group_waits_like_any_other(rpc: Rpc, stored: Any, service: ServiceProcess) -> None:
    run = rpc.create(batch_groups=2, overflow_action=BLOCK)
    run.fill(2)
    group = make_group("late")
    pushed = write(stored, run.run_id, group)
    request = groups_pb2.PushGroupRequest(run=run.ref, group=pushed)
    waiting = run.rpc.groups.PushGroup.future(request, timeout=60)
    blocked(service, 1)
    # Its expiry does not run while it waits.
    assert stored.pttl(key_of(run.run_id, group, pushed)) == -1
    run.pull(0)
    assert waiting.result(60).ack.outcome == QUEUED
    stream = Pusher(run)
    stream.send("next")
    stream.acked.get(timeout=TIMEOUT_S)
    stream.close()
    assert run.pull(1)[1][0].group == group


def test_a_blocked_group_that_is_pushed_twice_in_one_bundle_is_answered_twice(
    rpc: Rpc, stored: Any, service: ServiceProcess
) -> None:
    run = rpc.create(batch_groups=2, overflow_action=BLOCK)
    run.fill(2)
    pushed = write(stored, run.run_id, make_group("late"))
    with ThreadPoolExecutor(1) as threads:
        acks = threads.submit(run.push, [pushed, pushed])
        blocked(service, 1)
        run.pull(0)
        assert [ack.outcome for ack in acks.result(60)] == [QUEUED] * 2
    assert run.get().groups.accepted.groups == 3
