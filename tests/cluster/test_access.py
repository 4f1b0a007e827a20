"""A real service whose payloads lie on a cluster: access to the shards, and the store's users on every node."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import NoPermissionError, ResponseError

from buffer_service.domain import ops
from buffer_service.domain.ops import Direction
from buffer_service.store.redis_store import RedisRunStore
from buffer_service.store.users import PERIOD_MS, PayloadUsers
from buffer_wire.payloads.access import StoreAccess
from rollout_buffer.v1 import payloads_pb2 as pb
from rollout_buffer.v1 import runs_pb2
from tests.support.rpc import Rpc, RunRpc, connect
from tests.support.service import ServiceProcess, running_service
from tests.support.store_cluster import Node, StoreCluster, store_cluster
from tests.support.store_server import store_server

pytestmark = pytest.mark.timeout(120)

DIRECTIONS = {"GetWriteAccess": {"set"}, "GetReadAccess": {"get", "mget"}}
OPEN = {"auth", "hello", "quit", "reset"}
"""Commands with which everybody logs in and out."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[StoreCluster]:
    with store_cluster() as running:
        yield running


@pytest.fixture(scope="module")
def service(cluster: StoreCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running_service(tmp_path_factory.mktemp("data"), payload_store=cluster.url) as running:
        yield running


@pytest.fixture
def rpc(service: ServiceProcess) -> Iterator[Rpc]:
    connected = connect(service.address)
    with contextlib.closing(connected.channel):
        yield connected


def access(rpc: Rpc, run: RunRpc, method: str, **given: Any) -> pb.PayloadAccess:
    request = pb.PayloadAccessRequest(run=run.ref, **{"client_id": "c", "knows_shards": True, **given})
    answer: pb.PayloadAccess = getattr(rpc.payloads, method)(request, timeout=20)
    return answer


def users(node: Node) -> set[str]:
    return {name.decode() for name in node.do("ACL", "USERS")} - {"default"}


def entered(node: Node, given: pb.PayloadAccess) -> Any:
    return redis.Redis(host="127.0.0.1", port=node.port, username=given.username, password=given.password)


@pytest.mark.parametrize("method", DIRECTIONS)
def test_access_names_every_shard_and_its_user_is_one_of_every_node(
    method: str, rpc: Rpc, cluster: StoreCluster
) -> None:
    run = rpc.create()
    assert run.get().payload_shards == 3
    given = access(rpc, run, method)
    checked = StoreAccess.checked(given)
    assert not given.addresses
    assert {shard.address.port for shard in given.shards} == {cluster.primary(number).port for number in range(3)}
    for key in (f"k{number}" for number in range(50)):
        (place,) = checked.shards[checked.shard_of(key)]
        assert place.port == cluster.primary(cluster.shard_of(key)).port
    assert all(given.username in users(node) for node in cluster.nodes)


@pytest.mark.parametrize("method", DIRECTIONS)
def test_of_all_commands_a_user_has_those_of_its_direction_on_every_node(
    method: str, rpc: Rpc, cluster: StoreCluster
) -> None:
    run = rpc.create()
    given = access(rpc, run, method)
    key = f"rb:p:{run.run_id}:00:11:3"
    for node in cluster.nodes:
        allowed, tried = set(), 0
        for name, words in commands(node, key):
            tried += 1
            if node.do("ACL", "DRYRUN", given.username, *words) == b"OK":
                allowed.add(name)
        assert tried > 300
        assert allowed - OPEN == DIRECTIONS[method]


def commands(node: Node, key: str) -> Iterator[tuple[str, list[str]]]:
    """Every command and subcommand of the server, and arguments of the right number: a payload's key each time."""

    def all_of(infos: Any) -> Iterator[tuple[str, int]]:
        for info in infos:
            if not info[9]:
                yield info[0].decode(), abs(info[1])
            yield from all_of(info[9])

    for name, arity in all_of(node.do("COMMAND")):
        words = name.split("|")
        yield name, [*words, *[key] * (arity - len(words))]


def test_a_writer_stays_within_its_run_on_every_shard(rpc: Rpc, cluster: StoreCluster) -> None:
    run = rpc.create()
    given = access(rpc, run, "GetWriteAccess")
    for number in range(3):
        node = cluster.primary(number)
        own = next(key for key in keys(f"rb:p:{run.run_id}:") if cluster.shard_of(key) == number)
        other = next(key for key in keys(f"rb:p:{run.run_id}0:") if cluster.shard_of(key) == number)
        with contextlib.closing(entered(node, given)) as writer:
            assert writer.execute_command("SET", own, "abc", "NX", "PX", "60000")
            for words in (("SET", own, "x", "GET"), ("SET", other, "x"), ("GET", own), ("DEL", own)):
                with pytest.raises((NoPermissionError, ResponseError), match="permission"):
                    writer.execute_command(*words)
        assert node.do("GET", own) == b"abc"


def keys(prefix: str) -> Iterator[str]:
    return (f"{prefix}{number}" for number in range(1_000))


def test_a_node_that_comes_back_has_the_users_again_with_the_next_access(rpc: Rpc, cluster: StoreCluster) -> None:
    run = rpc.create()
    before = access(rpc, run, "GetReadAccess")
    (replica,) = cluster.replicas(1)
    replica.kill()
    assert access(rpc, run, "GetReadAccess").username == before.username, "one that is away holds nobody up"
    cluster.restart(replica)
    assert not users(replica)
    after = access(rpc, run, "GetReadAccess")
    assert (after.username, after.password) == (before.username, before.password)
    assert before.username in users(replica)


def test_a_deleted_runs_users_are_gone_from_every_node(rpc: Rpc, cluster: StoreCluster) -> None:
    run = rpc.create()
    name = access(rpc, run, "GetReadAccess").username
    assert all(name in users(node) for node in cluster.nodes)
    rpc.runs.DeleteRun(runs_pb2.DeleteRunRequest(run=run.ref))
    assert not any(name in users(node) for node in cluster.nodes)


async def test_users_of_former_periods_are_deleted_on_every_node(cluster: StoreCluster) -> None:
    with store_server() as server:
        store = await RedisRunStore.connect(server.url, timeout_s=10, payload_store=cluster.url)
        try:
            assert store._shards is not None
            made = PayloadUsers(store._connection, store._shards.every_node)
            seconds, _ = await store._connection.command("TIME")
            now_ms = int(seconds) * 1_000
            present, former, old = [
                await made.make("r", Direction.READ, "secret", now_ms - ago * PERIOD_MS) for ago in (0, 1, 2)
            ]
            assert all({present.name, former.name, old.name} <= users(node) for node in cluster.nodes)

            async def runs() -> list[str]:
                return ["r"]

            await made.expire(runs)
            assert all({present.name, former.name} <= users(node) for node in cluster.nodes)
            assert not any(old.name in users(node) for node in cluster.nodes)
        finally:
            await store.close()


async def test_slots_that_moved_are_told_at_once_to_whoever_met_them(cluster: StoreCluster) -> None:
    with store_server() as server:
        store = await RedisRunStore.connect(server.url, timeout_s=10, payload_store=cluster.url)
        try:
            first, last, _ = next(at for at in cluster.slots() if cluster.shard_of_slot(at[0]) == 0)
            middle = (first + last) // 2
            await store.payload_place()
            cluster.migrate(first, middle, 1)
            told = await asyncio.gather(*(store.payload_place(anew=True) for _ in range(3)))
            assert [owner(place, first) for place in told] == [cluster.primary(1).port] * 3
            cluster.migrate(first, middle, 0)
        finally:
            await store.close()


def owner(place: ops.StorePlace, slot: int) -> int:
    return next(shard.port for shard in place.shards if any(first <= slot <= last for first, last in shard.slots))


def test_a_client_that_knows_no_shards_is_relayed_and_shown_with_the_reason(rpc: Rpc) -> None:
    run = rpc.create()
    given = access(rpc, run, "GetWriteAccess", knows_shards=False)
    assert not given.shards
    assert "lie on a cluster" in StoreAccess.checked(given).relayed_because
    assert ["lie on a cluster" in client.why for client in run.get().relaying] == [True]


def test_the_operators_users_stand_in_on_a_cluster_too(cluster: StoreCluster, tmp_path: Path) -> None:
    named = ("env", "RB_PAYLOAD_WRITER=ops-w:secret", "RB_PAYLOAD_READER=ops-r:other")
    service = ServiceProcess(tmp_path, {"payload_store": cluster.url, "rpc_processes": 1}, within=named)
    service.start()
    rpc = connect(service.address)
    with contextlib.closing(rpc.channel):
        given = access(rpc, rpc.create(), "GetWriteAccess")
    assert service.stop() == 0
    assert (given.username, given.password, len(given.shards)) == ("ops-w", "secret", 3)
