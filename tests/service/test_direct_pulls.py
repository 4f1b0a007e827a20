"""Pulls whose large groups come as keys, and those that have the service check what lies in the store."""

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from buffer_wire.payloads.keys import key_prefix, size_of
from rollout_buffer.v1 import batches_pb2, groups_pb2
from tests.support.rpc import Rpc, RunRpc, connect, failure, make_group
from tests.support.service import ServiceProcess, running_service
from tests.support.store_server import StoreServer, store_server

LARGE_TOKENS = 6_000
"""A group of that many tokens has 54 KB."""
DIRECT_FROM_BYTES = 50_000
"""Less than the default."""


@pytest.fixture(scope="module")
def store() -> Iterator[StoreServer]:
    with store_server() as server:
        yield server


@pytest.fixture(scope="module")
def service(store: StoreServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    # What the service remembers of payloads would hide what became of them in the store.
    settings = {"store": store.url, "recent_bytes": 0, "direct_from_bytes": DIRECT_FROM_BYTES}
    with running_service(tmp_path_factory.mktemp("service"), **settings) as running:
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


def mixed(run: RunRpc, count: int) -> list[groups_pb2.Group]:
    """Queued groups: every second one is large."""
    groups = [make_group(f"x{i}", lengths=(LARGE_TOKENS if i % 2 else 6,), seed=i) for i in range(count)]
    run.push(groups)
    return groups


def key_of(stored: Any, run: RunRpc, group: groups_pb2.Group) -> bytes:
    (key,) = [
        key for key in stored.scan_iter(f"{key_prefix(run.run_id)}*") if stored.get(key) == group.SerializeToString()
    ]
    return bytes(key)


def names(delivered: list[batches_pb2.DeliveredGroup]) -> list[str]:
    return [item.group.header.task_id for item in delivered]


def test_large_groups_come_as_keys_in_their_place(rpc: Rpc, stored: Any) -> None:
    run = rpc.create(batch_groups=5)
    groups = mixed(run, 5)
    batch, delivered = run.pull(0, direct=True)
    assert batch.shard_groups == 5
    assert [item.HasField("group") for item in delivered] == [True, False, True, False, True]
    bodies = [stored.get(item.payload_key) or item.group.SerializeToString() for item in delivered]
    assert bodies == [group.SerializeToString() for group in groups]
    assert [item.sequence for item in delivered] == sorted(item.sequence for item in delivered)
    assert all(item.sequence for item in delivered)


def test_the_bytes_that_pass_the_service_by_are_counted(rpc: Rpc, service: ServiceProcess) -> None:
    name = "rollout_buffer_direct_bytes_total"
    run = rpc.create(batch_groups=4)
    groups = mixed(run, 4)
    before, sent_before = (
        service.metric(each, method="PullBatch") for each in (name, "rollout_buffer_rpc_sent_bytes_total")
    )
    run.pull(0, direct=True)
    service.until_metric(before + sum(groups[i].ByteSize() for i in (1, 3)), name, method="PullBatch")
    assert service.metric("rollout_buffer_rpc_sent_bytes_total", method="PullBatch") - sent_before < LARGE_TOKENS


def test_who_asks_for_no_keys_gets_none(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=4)
    groups = mixed(run, 4)
    assert [item.group for item in run.pull(0)[1]] == groups


def test_a_relayed_pull_settles_a_damaged_payload_as_lost(rpc: Rpc, stored: Any, service: ServiceProcess) -> None:
    before = service.metric("rollout_buffer_lost_payloads_total", found="damaged")
    run = rpc.create(batch_groups=4)
    groups = mixed(run, 4)
    for group, at in ((groups[1], LARGE_TOKENS), (groups[2], 8)):
        key = key_of(stored, run, group)
        flipped = stored.getrange(key, at, at)[0] ^ 1
        stored.setrange(key, at, bytes([flipped]))
    batch, delivered = run.pull(0)
    assert [item.group for item in delivered] == [groups[0], groups[3]]
    assert (batch.total_groups, run.get().groups.lost.groups) == (2, 2)
    assert run.get().groups.balanced
    service.until_metric(before + 2, "rollout_buffer_lost_payloads_total", found="damaged")


@pytest.mark.parametrize("body", [b"", b"short", b"\xff" * 200_000])
def test_what_is_no_group_any_more_is_damaged(rpc: Rpc, stored: Any, body: bytes) -> None:
    run = rpc.create(batch_groups=2)
    groups = mixed(run, 2)
    key = key_of(stored, run, groups[1])
    stored.set(key, body[: size_of(key.decode())])
    assert names(run.pull(0)[1]) == ["x0"]


def test_the_payload_of_another_group_is_damaged(rpc: Rpc, stored: Any) -> None:
    run = rpc.create(batch_groups=2)
    groups = [make_group(f"x{i}", seed=i) for i in range(2)]
    run.push(groups)
    keys = [key_of(stored, run, group) for group in groups]
    assert size_of(keys[0].decode()) == size_of(keys[1].decode())
    stored.set(keys[0], stored.get(keys[1]))
    assert names(run.pull(0)[1]) == ["x1"]


def test_a_payload_that_is_gone_is_counted_as_such(rpc: Rpc, stored: Any, service: ServiceProcess) -> None:
    before = service.metric("rollout_buffer_lost_payloads_total", found="gone")
    run = rpc.create(batch_groups=2)
    groups = mixed(run, 2)
    stored.delete(key_of(stored, run, groups[1]))
    # By its key alone the service does not know.
    assert len(run.pull(0, direct=True)[1]) == 2
    assert names(run.pull(0)[1]) == ["x0"]
    service.until_metric(before + 1, "rollout_buffer_lost_payloads_total", found="gone")


def test_damage_in_the_middle_of_a_stream_ends_it_for_a_retry(rpc: Rpc, stored: Any) -> None:
    run = rpc.create(batch_groups=4)
    groups = [make_group(f"x{i}", lengths=(400_000,), seed=i) for i in range(4)]
    for group in groups:
        run.push([group])
    stored.setrange(key_of(stored, run, groups[3]), 1_000_000, b"damage")
    error = failure(lambda: run.pull(0))
    assert (error.reason, error.retryable) == ("not_ready", True)
    assert names(run.pull(0)[1]) == ["x0", "x1", "x2"]


def test_a_fenced_trainer_settles_nothing(rpc: Rpc, stored: Any) -> None:
    run = rpc.create(batch_groups=2)
    groups = mixed(run, 2)
    run.pull(0, direct=True)
    run.resume(next_step=0)
    stored.delete(key_of(stored, run, groups[1]))
    fenced = RunRpc(rpc, run.run_id, term=1)
    assert failure(lambda: fenced.pull(0)).reason == "stale_term"
    assert run.get().groups.lost.groups == 0
