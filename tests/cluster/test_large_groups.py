"""Groups in parts over the shards of a cluster: past the service, and part by part through it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from buffer_wire.payloads.keys import part_keys
from tests.support.large_groups import large, pull_by, push_by_worker
from tests.support.rpc import connect
from tests.support.service import ServiceProcess, running_service
from tests.support.store_cluster import StoreCluster, store_cluster

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def cluster() -> Iterator[StoreCluster]:
    with store_cluster() as running:
        yield running


@pytest.fixture
def service(cluster: StoreCluster, tmp_path: Path) -> Iterator[ServiceProcess]:
    settings = {"payload_store": cluster.url, "rpc_processes": 1, "max_message_bytes": 1 << 20, "recent_bytes": 0}
    with running_service(tmp_path / "service", **settings) as running:
        yield running


@pytest.mark.parametrize("directly", [True, False], ids=["direct", "relayed"])
async def test_a_group_in_parts_lies_on_all_shards_and_comes_back_byte_for_byte(
    service: ServiceProcess, cluster: StoreCluster, *, directly: bool
) -> None:
    rpc = connect(service.address)
    run, group = rpc.create(batch_groups=1), large("a", 40 << 20)
    (result,), written = await push_by_worker(service.address, run.run_id, [group], directly=directly)
    assert result.outcome == "queued"
    assert (written > 0) is directly
    (delivered,) = run.pull(0, direct=True, reads_parts=True)[1]
    parts = {part.key for part in part_keys(delivered.payload_key)}
    lie = cluster.keys("rb:p:*")
    assert all(lie)
    assert set().union(*lie) == parts
    for kind in ("blocking", "asyncio"):
        assert await pull_by(kind, service.address, run.run_id, directly=directly) == [group.payload]
    run.commit(0)
    run.checkpoint(0)
    assert not any(cluster.keys("rb:p:*"))
    rpc.channel.close()
