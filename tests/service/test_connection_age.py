"""Connections and streams that end in good order at an age: clients connect anew, and nothing is cut off or lost."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from bench.balancer import Balancer
from rollout_buffer.v1 import groups_pb2, weights_pb2
from tests.support.rpc import TIMEOUT_S, connect, failure, make_group, streamed
from tests.support.service import ServiceProcess, running_service

AGE_S = 0.5
WAIT_S = 2.0
"""A pull's wait: several ages of its connection."""
BUNDLES = 500
"""Bundles that take longer to send than a stream may live."""


@pytest.fixture(scope="module")
def aging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running_service(tmp_path_factory.mktemp("aging"), connection_age_s=AGE_S) as service:
        yield service


def test_a_watch_ends_in_order_after_its_connection_and_the_next_comes_on_another(aging: ServiceProcess) -> None:
    with Balancer([aging.address]) as balancer:
        client = connect(balancer.address)
        run = client.create()
        request = weights_pb2.WatchWeightsRequest(run=run.ref)
        started = time.monotonic()
        watch = streamed(client.weights.WatchWeights(request, timeout=TIMEOUT_S))
        next(watch)
        connections = balancer.accepted.total()
        assert list(watch) == []
        assert time.monotonic() - started >= 1.1 * AGE_S
        next(streamed(client.weights.WatchWeights(request, timeout=TIMEOUT_S)))
        assert balancer.accepted.total() > connections
        client.channel.close()


def test_a_push_stream_ends_in_order_after_all_that_it_acknowledged(aging: ServiceProcess) -> None:
    client = connect(aging.address)
    run = client.create(batch_groups=8, max_queued_groups=100_000)
    bundles = run.bundles([[make_group(f"g{i}")] for i in range(BUNDLES)])
    replies = list(streamed(client.groups.PushGroups(_slowly(bundles), timeout=TIMEOUT_S)))
    assert [reply.sequence for reply in replies] == list(range(1, len(replies) + 1))
    assert run.get().groups.accepted.groups == len(replies)
    assert 1 < len(replies) < BUNDLES
    assert aging.metric("rollout_buffer_aged_streams_total", method="PushGroups") == 1
    assert aging.metric("rollout_buffer_rpcs_total", method="PushGroups", code="OK") == 1
    client.channel.close()


def test_calls_that_take_longer_are_not_cut_and_calls_meanwhile_go_on(aging: ServiceProcess) -> None:
    with Balancer([aging.address]) as balancer, ThreadPoolExecutor() as pool:
        client = connect(balancer.address)
        run = client.create(batch_groups=8)
        pull = pool.submit(failure, lambda: run.pull(0, wait_ms=round(WAIT_S * 1000)))
        calls = 0
        while not pull.done():
            run.get()
            calls += 1
        assert pull.result().reason == "batch_not_ready"
        assert calls > balancer.accepted.total() > 2
        client.channel.close()


def test_without_an_age_a_connection_stays(tmp_path: Path) -> None:
    with running_service(tmp_path, connection_age_s=0) as service, Balancer([service.address]) as balancer:
        client = connect(balancer.address)
        run = client.create()
        watch = client.weights.WatchWeights(weights_pb2.WatchWeightsRequest(run=run.ref), timeout=2 * AGE_S)
        with pytest.raises(grpc.RpcError) as ended:
            list(watch)
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert balancer.accepted.total() == 1
        client.channel.close()


def _slowly(bundles: Iterator[groups_pb2.PushGroupsRequest]) -> Iterator[groups_pb2.PushGroupsRequest]:
    for bundle in bundles:
        yield bundle
        time.sleep(0.01)
