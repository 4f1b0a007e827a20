"""Clusters that are refused for payloads, and stores whose payloads lie somewhere else."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from buffer_service.store.address import Address
from buffer_service.store.redis_store import RedisRunStore
from buffer_wire.errors import StoreUnavailable, StoreUnsuitable
from tests.store.driver import Run, emptied
from tests.support.sentinels import free_port
from tests.support.store_cluster import StoreCluster, store_cluster
from tests.support.store_server import StoreServer, store_server

pytestmark = pytest.mark.timeout(60)

REDIS = shutil.which("redis-server")
"""Redis 7, as systems have it."""


@contextmanager
def configured(cluster: StoreCluster, name: str, value: str, back: str) -> Iterator[None]:
    cluster.primary(2).do("CONFIG", "SET", name, value)
    yield
    cluster.primary(2).do("CONFIG", "SET", name, back)


@pytest.mark.parametrize(
    ("name", "value", "back"),
    [("cluster-require-full-coverage", "yes", "no"), ("maxmemory-policy", "allkeys-lru", "noeviction")],
)
async def test_one_primary_with_a_setting_that_loses_payloads_is_enough_to_be_refused(
    index: StoreServer, shards: StoreCluster, name: str, value: str, back: str
) -> None:
    with configured(shards, name, value, back):
        port = shards.primary(2).port
        with pytest.raises(StoreUnsuitable, match=f"127.0.0.1:{port} .*{name} is {value}"):
            await emptied(index, shards)
    await (await emptied(index, shards)).close()


async def test_a_server_that_is_no_cluster_is_refused(index: StoreServer) -> None:
    index.flush()
    port = free_port()
    with store_server("--port", str(port)), pytest.raises(StoreUnsuitable, match="do not run in cluster mode"):
        await RedisRunStore.connect(index.url, payload_store=f"redis+cluster://127.0.0.1:{port}")
    with pytest.raises(StoreUnavailable):
        await RedisRunStore.connect(index.url, payload_store=f"redis+cluster://127.0.0.1:{port}")


async def test_a_cluster_is_no_place_for_what_decides(shards: StoreCluster) -> None:
    with pytest.raises(StoreUnsuitable, match="--payload-store"):
        await RedisRunStore.connect(f"redis://127.0.0.1:{shards.primary(0).port}")


@pytest.mark.parametrize(
    ("name", "value", "back"),
    [("cluster-require-full-coverage", "yes", "no"), ("maxmemory-policy", "allkeys-lru", "noeviction")],
)
async def test_one_primary_with_a_setting_that_loses_runs_is_enough_to_be_refused(
    shards: StoreCluster, name: str, value: str, back: str
) -> None:
    with configured(shards, name, value, back):
        port = shards.primary(2).port
        with pytest.raises(StoreUnsuitable, match=f"127.0.0.1:{port} .*{name} is {value}.*{back}"):
            await emptied(None, shards)
    await (await emptied(None, shards)).close()


async def test_runs_need_servers_that_move_slots_as_a_whole(index: StoreServer) -> None:
    if REDIS is None:
        pytest.skip("needs redis-server")
    with store_cluster(replicas=0, binary=Path(REDIS)) as old:
        with pytest.raises(StoreUnsuitable, match=r"redis_version is 7\.\d.*Valkey 9\.0 or Redis 8\.4"):
            await emptied(None, old)
        # For payloads they do.
        await (await emptied(index, old)).close()


async def test_a_cluster_of_runs_has_their_payloads_too(shards: StoreCluster) -> None:
    with pytest.raises(StoreUnsuitable, match="leave out --payload-store"):
        await RedisRunStore.connect(shards.url, payload_store=shards.url)


async def test_where_payloads_lie_changes_only_while_there_is_no_run(index: StoreServer, shards: StoreCluster) -> None:
    store = await emptied(index, shards)
    run = Run(store)
    await run.create()
    with pytest.raises(StoreUnsuitable, match="payloads of its runs lie on a cluster"):
        await emptied(index, None, keep=True)
    await store.delete_run(run.run_id)
    beside = await emptied(index, None, keep=True)
    await Run(beside).create()
    with pytest.raises(StoreUnsuitable, match="payloads of its runs lie beside the index"):
        await emptied(index, shards, keep=True)
    await beside.close()
    await store.close()


async def test_a_shard_that_is_away_keeps_no_service_from_starting(index: StoreServer, shards: StoreCluster) -> None:
    shards.freeze(shards.primary(1))
    try:
        store = await emptied(index, None)
        await store.close()
        started = await RedisRunStore.connect(index.url, payload_store=shards.url)
        assert {one.memory_used_bytes is None for one in (await started.facts()).payload_shards} == {True, False}
        await started.close()
    finally:
        for node in shards.nodes:
            if node.frozen:
                shards.thaw(node)


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "redis+sentinel://h/s",
        "redis+cluster://",
        "redis+cluster://h:x",
        "redis+cluster://h/1",
        "unix+cluster://h",
    ],
)
def test_what_is_no_clusters_address(url: str) -> None:
    with pytest.raises(StoreUnsuitable, match="redis\\+cluster"):
        Address.parse_cluster(url)


def test_a_clusters_address_names_nodes_and_hides_its_password() -> None:
    address = Address.parse_cluster("rediss+cluster://user:p%40ss@a:1,[::1]:2,c")
    assert address.nodes == (("a", 1), ("::1", 2), ("c", 6379))
    assert (address.username, address.password, address.tls) == ("user", "p@ss", True)
    assert "p%40ss" not in address.shown
    assert address.at("a", 1).shown == "a:1 (the cluster)"
