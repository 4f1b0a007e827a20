"""The scripts of the bundled cluster, with real servers: each pod has a name, which leads to an address of loopback."""

import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.chart.helm import VALUE_SETS, pods_of
from tests.chart.store_pod import StorePod, until
from tests.support.sentinels import free_port

SHARDS = 3
NODE_TIMEOUT_MS = 2_000

pytestmark = pytest.mark.timeout(400)


class ShardsPod(StorePod):
    """A server of the cluster. `name` leads to its address, which may change from start to start."""

    def __init__(self, programs: Path, volume: Path, name: str, ports: tuple[int, int], names: tuple[str, ...]) -> None:
        super().__init__(programs, volume, "", ports, names)
        self.name, self.programs = name, programs
        self.environment |= {
            "SELF": name,
            "SHARDS": str(SHARDS),
            "NODE_TIMEOUT_MS": str(NODE_TIMEOUT_MS),
            "BUS_PORT": str(self.sentinel_port),
        }

    def begin(self, address: str) -> None:
        """Start it at an address."""
        self.host = address
        self.environment |= {"BIND": address, "ADDRESS": address}
        (self.programs / "names" / self.name).write_text(f"{address} STREAM {self.name}\n")
        self.start("cluster")

    def node(self) -> list[str]:
        """Its own fields of CLUSTER NODES; none while it does not answer."""
        lines = [line.split() for line in self.ask("CLUSTER", "NODES").splitlines() if "myself" in line]
        return lines[0] if lines else []

    @property
    def slots(self) -> list[str]:
        """Ranges that it serves."""
        return self.node()[8:]

    @property
    def follows(self) -> str:
        """Id of its primary; - for a primary, empty while it does not answer."""
        return next(iter(self.node()[3:4]), "")

    @property
    def id(self) -> str:
        """Its id in the cluster; empty while it does not answer."""
        return next(iter(self.node()), "")


@pytest.fixture
def make(programs: Path, tmp_path: Path) -> Iterator[Callable[[int], list[ShardsPod]]]:
    """Make pods, of which each knows so many names; further ones with the next names where some are there."""
    folder = tmp_path / "bin"
    (folder / "names").mkdir(parents=True)
    for program in ("valkey-server", "valkey-cli"):
        (folder / program).symlink_to((programs / program).resolve())
    # What the cluster's DNS says.
    (folder / "getent").write_text(f'#!/bin/sh\ncat "{folder}/names/$2"\n')
    (folder / "getent").chmod(0o755)
    ports = (free_port(), free_port())
    made: list[ShardsPod] = []

    def more(count: int) -> list[ShardsPod]:
        names = tuple(f"s-{place}.shards.training.svc" for place in range(len(made) + count))
        for pod in made:
            pod.environment["HOSTS"] = " ".join(names)
        new = [ShardsPod(folder, tmp_path / name, name, ports, names) for name in names[len(made) :]]
        made.extend(new)
        return new

    yield more
    for pod in made:
        pod.kill()


def _whole(pods: Sequence[ShardsPod]) -> bool:
    """Tell whether all are one cluster that serves every slot, and every replica is in step."""
    ids = {pod.id for pod in pods}
    return (
        len(ids - {""}) == len(pods)
        and all("cluster_slots_ok:16384" in pod.ask("CLUSTER", "INFO") for pod in pods)
        and all("cluster_state:ok" in pod.ask("CLUSTER", "INFO") for pod in pods)
        and all(ids <= _connected(pod) for pod in pods)
        and all(pod.role == "master" or "link_status:up" in pod.ask("INFO", "replication") for pod in pods)
        and all("all servers know each other" in pod.logs() for pod in pods)
    )


def _lose(pod: ShardsPod) -> None:
    """kill -9, and the volume is gone."""
    pod.kill()
    shutil.rmtree(pod.volume)
    (pod.volume / "run").mkdir(parents=True)


def _connected(pod: ShardsPod) -> set[str]:
    lines = pod.ask("CLUSTER", "NODES").splitlines()
    return {line.split()[0] for line in lines if "myself" in line or (" connected" in line and "fail" not in line)}


def _probe() -> list[str]:
    (values,) = (path for path in VALUE_SETS if path.name == "store-cluster-values.yaml")
    (pod,) = pods_of(values, "shards")
    command: list[str] = pod.container("server")["readinessProbe"]["exec"]["command"]
    return command


def test_a_cluster_forms_itself_and_keeps_what_it_has(make: Callable[[int], list[ShardsPod]], tmp_path: Path) -> None:
    pods = make(2 * SHARDS)
    first, second = pods[:SHARDS], pods[SHARDS:]

    def ready(pod: ShardsPod) -> bool:
        return pod.ready(_probe(), tmp_path / "probe")

    # All at once but one: nobody begins without it.
    for place, pod in enumerate(pods[1:], 1):
        pod.begin(f"127.0.0.{place + 1}")
    until(lambda: all(f"waiting for: {pods[0].name}" in pod.logs() for pod in first[1:]), "they wait", pods)
    assert not any(pod.slots for pod in pods[1:])
    assert not ready(pods[1]), "there is no cluster yet"
    pods[0].begin("127.0.0.1")
    until(lambda: _whole(pods), "there is a cluster", pods)

    assert [pod.slots for pod in first] == [["0-5460"], ["5461-10921"], ["10922-16383"]]
    assert [pod.follows for pod in second] == [pod.id for pod in first]
    assert all(ready(pod) for pod in pods)
    for name, value in {
        "maxmemory-policy": "noeviction",
        "appendonly": "yes",
        "cluster-require-full-coverage": "no",
        "cluster-node-timeout": str(NODE_TIMEOUT_MS),
    }.items():
        assert all(pod.ask("CONFIG", "GET", name).splitlines()[1] == value for pod in pods)
    assert all("NOAUTH" in pod.ask("PING", password="") for pod in pods)
    names = {pod.name for pod in pods}
    until(
        lambda: names <= set(pods[0].ask("CLUSTER", "SLOTS").splitlines()), "clients are told names, which stay", pods
    )

    key = next(f"k{n}" for n in range(99) if int(pods[0].ask("CLUSTER", "KEYSLOT", f"k{n}")) <= 5460)
    assert first[0].ask("SET", key, "1") == "OK"
    until(lambda: first[0].ask("WAIT", "1", "1000") == "1", "the replica has it", pods)

    # A primary that is told to end hands its slots over first.
    first[0].processes["cluster"].send_signal(signal.SIGTERM)
    first[0].processes["cluster"].wait(timeout=60)
    until(lambda: second[0].slots == ["0-5460"], "the replica has them", pods[:1] + second[:1])
    assert "auto failover to replica" in first[0].logs()
    assert second[0].ask("SET", key, "2") == "OK", "which the former primary lacks"

    # All are lost, and come back with other addresses, which are those of others now.
    for pod in pods:
        pod.kill()
    for place, pod in enumerate(pods):
        pod.begin(f"127.0.0.{(place + 1) % len(pods) + 1}")
    until(lambda: _whole(pods), "they find each other", pods)
    # Where others are at their addresses, primaries may be taken for dead: replicas in step are promoted, and no other.
    primary, replica = sorted((first[0], second[0]), key=lambda pod: pod.role)
    assert primary.slots == ["0-5460"]
    assert primary.ask("GET", key) == "2"

    # A primary is lost with its volume, and is there again at once.
    _lose(primary)
    primary.begin(primary.host)
    until(lambda: replica.slots == ["0-5460"], "the other has the slots", pods)
    until(lambda: primary.follows == replica.id, "the new one follows it", pods)
    until(lambda: _whole(pods), "all are in step", pods)
    assert replica.ask("GET", key) == "2"


def test_replicas_are_added_and_slots_of_a_server_that_is_gone_are_nobodys(
    make: Callable[[int], list[ShardsPod]],
) -> None:
    primaries = make(SHARDS)
    for place, pod in enumerate(primaries):
        pod.begin(f"127.0.0.{place + 1}")
    until(lambda: _whole(primaries), "there is a cluster", primaries)
    replicas = make(SHARDS)
    for place, pod in enumerate(replicas):
        pod.begin(f"127.0.0.{SHARDS + place + 1}")
    until(lambda: _whole(primaries + replicas), "they follow", primaries + replicas)
    assert [pod.follows for pod in replicas] == [pod.id for pod in primaries]

    # A shard is lost with all of its volumes.
    gone = [primaries[0].id, replicas[0].id]
    for pod in (primaries[0], replicas[0]):
        _lose(pod)
    for pod in (primaries[0], replicas[0]):
        pod.begin(pod.host)
    until(
        lambda: "slots of 0 to 5460 are those of a server that is gone" in primaries[0].logs(),
        "it says what it waits for",
        [primaries[0]],
    )
    assert primaries[0].slots == []
    for pod in primaries + replicas:
        for node in gone:
            pod.ask("CLUSTER", "FORGET", node)
    until(lambda: primaries[0].slots == ["0-5460"], "it begins anew", primaries)
    until(lambda: replicas[0].follows == primaries[0].id, "its replica follows", replicas)
