"""Deaths between a write to the store and the end of its group, and what becomes of the payload: the table of the
protocol's "Two ways for payloads". That of a worker which dies is in tests/workers.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from rollout_buffer.v1 import batches_pb2, groups_pb2, runs_pb2
from tests.service.test_blocked_pushes import BLOCK, blocked
from tests.support.rpc import TIMEOUT_S, Rpc, RunRpc, connect, failure, make_group
from tests.support.service import ServiceProcess, running_service
from tests.support.store_server import StoreServer, store_server
from tests.support.written import key_of, write

QUEUED, MISSING = groups_pb2.PUSH_OUTCOME_QUEUED, groups_pb2.PUSH_OUTCOME_PAYLOAD_MISSING
LARGE = (9_000,)
"""Tokens of a group of 81 KB, which a pull gives as a key."""


@pytest.fixture(scope="module")
def store() -> Iterator[StoreServer]:
    with store_server("--appendonly", "yes", "--appendfsync", "no") as server:
        yield server


@pytest.fixture
def stored(store: StoreServer) -> Iterator[Any]:
    with redis.Redis(unix_socket_path=str(store.socket)) as client:
        yield client


@pytest.fixture(scope="module")
def service(store: StoreServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running_service(
        tmp_path_factory.mktemp("service"), store=store.url, rpc_processes=1, recent_bytes=0
    ) as running:
        yield running


@pytest.fixture
def rpc(service: ServiceProcess) -> Iterator[Rpc]:
    client = connect(service.address)
    yield client
    client.channel.close()


def push(run: RunRpc, pushed: groups_pb2.Group) -> Any:
    """A push of one group that goes on."""
    return run.rpc.groups.PushGroup.future(groups_pb2.PushGroupRequest(run=run.ref, group=pushed), timeout=60)


def died(service: ServiceProcess, call: Any) -> None:
    """The service dies under a call, and comes back."""
    service.kill()
    assert failure(lambda: call.result(TIMEOUT_S)).retryable
    service.start()


def outcome(run: RunRpc, pushed: groups_pb2.Group) -> int:
    (ack,) = run.push([pushed])
    return ack.outcome


def test_a_store_that_loses_the_write_has_it_written_again(rpc: Rpc, stored: Any) -> None:
    run = rpc.create(batch_groups=1)
    group = make_group("a")
    pushed = write(stored, run.run_id, group)
    stored.delete(key_of(run.run_id, group, pushed))
    assert outcome(run, pushed) == MISSING
    assert outcome(run, write(stored, run.run_id, group)) == QUEUED
    assert [item.group for item in run.pull(0)[1]] == [group]


def test_a_service_that_dies_between_decision_and_answer_answers_the_repeated_push_like_the_first(
    service: ServiceProcess, rpc: Rpc, stored: Any
) -> None:
    run = rpc.create(batch_groups=2)
    # The decision is made, and its answer waits for a replica that there is not.
    waits = runs_pb2.RunPolicy(wait_replicas=1, wait_timeout_ms=60_000)
    names = ("wait_replicas", "wait_timeout_ms")
    request = runs_pb2.UpdatePolicyRequest(run=run.ref, policy=waits, fields=names)
    # Held: gRPC cancels a call that nobody refers to, perhaps before it is sent.
    update = rpc.runs.UpdatePolicy.future(request, timeout=60)
    while not run.get().policy.wait_replicas:
        assert not update.done()
    group = make_group("a")
    pushed = write(stored, run.run_id, group)
    call = push(run, pushed)
    while stored.pttl(key_of(run.run_id, group, pushed)) != -1:
        assert not call.done()
    died(service, call)
    rpc.runs.UpdatePolicy(runs_pb2.UpdatePolicyRequest(run=run.ref, fields=names), timeout=TIMEOUT_S)
    assert outcome(run, pushed) == QUEUED
    assert run.get().groups.accepted.groups == 1
    run.fill(1)
    assert [item.group.header.task_id for item in run.pull(0)[1]] == ["a", "x0"]


def test_a_service_that_dies_while_a_group_waits_for_room_has_the_repeated_push_go_on_waiting(
    service: ServiceProcess, rpc: Rpc, stored: Any
) -> None:
    run = rpc.create(batch_groups=2, overflow_action=BLOCK)
    run.fill(2)
    group = make_group("late")
    pushed = write(stored, run.run_id, group)
    call = push(run, pushed)
    blocked(service, 1)
    line = stored.zrange(f"rb:{{{run.run_id}}}:waiting", 0, -1)
    died(service, call)
    call = push(run, pushed)
    blocked(service, 1)
    assert stored.zrange(f"rb:{{{run.run_id}}}:waiting", 0, -1) == line
    run.pull(0)
    assert call.result(60).ack.outcome == QUEUED
    run.fill(1, prefix="y")
    assert run.pull(1)[1][0].group == group


def test_a_caller_that_goes_while_its_group_waits_writes_it_again(
    service: ServiceProcess, rpc: Rpc, stored: Any
) -> None:
    run = rpc.create(batch_groups=2, overflow_action=BLOCK)
    run.fill(2)
    group = make_group("late")
    pushed = write(stored, run.run_id, group)
    call = push(run, pushed)
    blocked(service, 1)
    call.cancel()
    blocked(service, 0)
    while stored.zcard(f"rb:{{{run.run_id}}}:staging"):
        pass
    run.pull(0)
    assert outcome(run, pushed) == MISSING
    assert outcome(run, write(stored, run.run_id, group)) == QUEUED


def test_a_store_that_is_killed_after_the_answer_has_group_and_payload(
    store: StoreServer, rpc: Rpc, stored: Any
) -> None:
    run = rpc.create(batch_groups=1)
    group = make_group("a", lengths=LARGE)
    assert outcome(run, write(stored, run.run_id, group)) == QUEUED
    store.kill()
    store.start()
    assert [item.group for item in run.pull(0, wait_ms=10_000)[1]] == [group]


def test_a_trainer_that_dies_between_pull_and_read_finds_the_payload_until_its_checkpoint(
    rpc: Rpc, stored: Any
) -> None:
    run = rpc.create(batch_groups=1)
    group = make_group("a", lengths=LARGE)
    pushed = write(stored, run.run_id, group)
    assert outcome(run, pushed) == QUEUED
    delivered = run.pull(0, direct=True)[1]
    assert [item.payload_key for item in delivered] == [key_of(run.run_id, group, pushed)]
    run.resume(next_step=0, mode=batches_pb2.RESUME_MODE_REPLAY)
    assert run.pull(0, direct=True)[1] == delivered
    assert stored.get(delivered[0].payload_key) == group.SerializeToString()
    run.commit(0)
    assert stored.get(delivered[0].payload_key) == group.SerializeToString()
    run.checkpoint(0)
    assert stored.get(delivered[0].payload_key) is None
