"""Keys of what the service stores: they say its size, and by a checksum what it is."""

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from buffer_wire.codec import split_group
from buffer_wire.payloads.keys import group_checksum, key_prefix, payload_checksum, size_of
from rollout_buffer.v1 import groups_pb2, tasks_pb2
from tests.support.rpc import Rpc, RunRpc, connect, make_group, make_task
from tests.support.service import running_service
from tests.support.store_server import StoreServer, store_server


@pytest.fixture(scope="module")
def store() -> Iterator[StoreServer]:
    with store_server() as server:
        yield server


@pytest.fixture(scope="module")
def rpc(store: StoreServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rpc]:
    with running_service(tmp_path_factory.mktemp("service"), store=store.url) as service:
        client = connect(service.address)
        yield client
        client.channel.close()


def stored(store: StoreServer, run: RunRpc) -> dict[str, bytes]:
    """Payloads of a run by their keys."""
    with redis.Redis(unix_socket_path=str(store.socket)) as client:
        plain: Any = client
        return {key.decode(): plain.get(key) for key in plain.scan_iter(f"{key_prefix(run.run_id)}*")}


def assert_says_what_it_is(key: str, body: bytes) -> None:
    header, payload = split_group(memoryview(body))
    assert size_of(key) == len(body)
    assert key.endswith(f":{group_checksum(header, payload_checksum(payload)):016x}:{size_of(key)}")


def test_a_relayed_group(rpc: Rpc, store: StoreServer) -> None:
    run = rpc.create(batch_groups=2)
    groups = run.fill(2)
    found = stored(store, run)
    assert sorted(found.values()) == sorted(group.SerializeToString() for group in groups)
    for key, body in found.items():
        assert_says_what_it_is(key, body)


def test_a_partial_rollout(rpc: Rpc, store: StoreServer) -> None:
    run = rpc.create(batch_groups=1)
    run.submit([make_task("a")])
    lease = run.lease().leases[0]
    made = make_group("a", lease_id=lease.lease_id)
    made.header.samples[0].finish_reason = groups_pb2.FINISH_REASON_ABORTED
    back = tasks_pb2.LeaseReturn(lease_id=lease.lease_id, kind=tasks_pb2.RETURN_KIND_INTERRUPTED, partial_rollout=made)
    rpc.tasks.ReturnLeases(
        tasks_pb2.ReturnLeasesRequest(
            run=run.ref, worker_id=run.worker_id, instance_id=run.instance_id, returns=[back]
        ),
        timeout=20,
    )
    ((key, body),) = stored(store, run).items()
    assert body == made.SerializeToString()
    assert_says_what_it_is(key, body)
