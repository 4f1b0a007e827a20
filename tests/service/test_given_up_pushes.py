"""Blocked pushes that the store gives up, or has reason to: a stopped replica, a clock that jumps."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from rollout_buffer.v1 import groups_pb2
from tests.service.test_blocked_pushes import BLOCK, QUEUED, Pusher, blocked, pulled
from tests.support.rpc import TIMEOUT_S, Rpc, RunRpc, connect, failure, failure_of, make_group
from tests.support.service import ServiceProcess, running_service
from tests.support.store_server import StoreServer, store_server


@pytest.fixture(scope="module")
def store() -> Iterator[StoreServer]:
    with store_server() as server:
        yield server


@pytest.fixture(scope="module")
def service(store: StoreServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running_service(tmp_path_factory.mktemp("service"), store=store.url) as service:
        yield service


@pytest.fixture
def run(service: ServiceProcess) -> Iterator[RunRpc]:
    client: Rpc = connect(service.address)
    yield client.create(batch_groups=2, overflow_action=BLOCK)
    client.channel.close()


def give_up(store: StoreServer, run: RunRpc, payloads: int) -> None:
    """Do what the sweep of another replica does with blocked pushes whose own replica was stopped for ten minutes."""
    client: Any = redis.Redis(unix_socket_path=str(store.socket))
    staging, waiting = (f"rb:{{{run.run_id}}}:{name}" for name in ("staging", "waiting"))
    keys = client.zrange(staging, 0, -1)
    assert len(keys) == payloads
    client.zrem(waiting, *keys)
    client.unlink(*keys)
    client.zrem(staging, *keys)
    client.close()


def test_what_was_given_up_while_its_push_waits_is_sent_again(
    service: ServiceProcess, run: RunRpc, store: StoreServer
) -> None:
    run.fill(2)
    request = groups_pb2.PushGroupRequest(run=run.ref, group=make_group("unary"))
    unary = run.rpc.groups.PushGroup.future(request, timeout=60)
    blocked(service, 1)
    stream = Pusher(run)
    stream.send("streamed")
    blocked(service, 2)
    give_up(store, run, 2)
    # No final answer: whoever repeats the same push is served.
    assert failure(lambda: unary.result(60)).retryable
    error = failure_of(stream.error.get(timeout=60))
    assert (error.reason, error.retryable) == ("not_ready", True)
    assert pulled(run, 0) == ["x0", "x1"]
    assert [ack.outcome for ack in run.push([make_group("unary"), make_group("streamed")])] == [QUEUED, QUEUED]
    assert run.get().statistics.pushes_closed == 0


@pytest.mark.parametrize("seconds", [700, 3_600])
def test_a_jump_of_the_clock_loses_no_blocked_push(
    service: ServiceProcess, run: RunRpc, store: StoreServer, seconds: int
) -> None:
    run.fill(2)
    pushers = [Pusher(run) for _ in range(5)]
    for i, pusher in enumerate(pushers):
        pusher.send(f"p{i}a", f"p{i}b")
    blocked(service, 5)
    client: Any = redis.Redis(unix_socket_path=str(store.socket))
    key = f"rb:{{{run.run_id}}}:run"
    # All that a run knows of its host's clock is how far behind it is.
    before = int(client.hincrby(key, "lag", -1_000 * seconds))
    while int(client.hget(key, "lag")) == before:
        time.sleep(0.01)
    client.close()
    names = [name for step in range(6) for name in pulled(run, step)]
    assert sorted(names) == sorted(["x0", "x1", *(f"p{i}{part}" for i in range(5) for part in "ab")])
    for pusher in pushers:
        pusher.acked.get(timeout=TIMEOUT_S)
        pusher.close()
    assert run.get().statistics.pushes_closed == 0
