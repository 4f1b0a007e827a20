"""A cluster of real servers on loopback: shards of a primary and replicas, in folders of their own, gone with the test.

with store_cluster(replicas=2, node_timeout_ms=2_000) as cluster:
    killed = cluster.kill(0)
    cluster.until_promoted(0)
    cluster.restart(killed)
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import redis

from buffer_service.store.embedded.binary import find_binary
from tests.support.sentinels import POLL_S, START_TIMEOUT_S, Server, Tls, free_port, tls_settings

SLOTS = 16_384
NODE_TIMEOUT_MS = 2_000
"""Time without an answer after which a node is taken for dead; its replica serves about a second later."""


class Node(Server):
    """One server of a cluster. Its number of the shard is that of the start."""

    def __init__(self, binary: Path, shard: int, *settings: str, tls: bool = False) -> None:
        bus = free_port()
        super().__init__(binary, "--cluster-enabled", "yes", "--cluster-port", str(bus), *settings, tls=tls)
        self.bus, self.shard = bus, shard
        self._client: Any = redis.Redis(host="127.0.0.1", port=self.port, socket_timeout=10)

    def do(self, *words: object) -> Any:
        """The reply to a command as the server gives it. Raises redis.RedisError."""
        connection = self._client.connection_pool.get_connection()
        try:
            connection.send_command(*words)
            return connection.read_response()
        except redis.ConnectionError:
            connection.disconnect()
            raise
        finally:
            self._client.connection_pool.release(connection)

    @property
    def id(self) -> str:
        """Name of the node in the cluster."""
        name: str = self.do("CLUSTER", "MYID").decode()
        return name

    @property
    def runs(self) -> bool:
        """True for a node that is neither killed nor frozen."""
        return self.process is not None and self.process.poll() is None and not self.frozen

    frozen = False

    def end(self) -> None:
        """Kill it, close what is connected to it, and delete its folder."""
        self._client.close()
        super().end()


class StoreCluster:
    """Shards and their nodes. `start` and `end` it, or use `store_cluster`."""

    def __init__(
        self,
        binary: Path,
        *settings: str,
        shards: int = 3,
        replicas: int = 1,
        node_timeout_ms: int = NODE_TIMEOUT_MS,
        tls: Tls | None = None,
    ) -> None:
        if tls is not None:
            settings += (*tls_settings(tls), "--tls-cluster", "yes")
        of_all = (
            "--cluster-node-timeout", str(node_timeout_ms), "--cluster-require-full-coverage", "no",
            # A replica that was frozen is promoted all the same.
            "--cluster-replica-validity-factor", "0",
            # A node stays in its shard, whatever slots that has.
            "--cluster-allow-replica-migration", "no", *settings,
        )  # fmt: skip
        self.shards = [
            [Node(binary, shard, *of_all, tls=tls is not None) for _ in range(1 + replicas)] for shard in range(shards)
        ]
        """Nodes of each shard; the first one was its primary at the start."""
        self.nodes = [node for nodes in self.shards for node in nodes]

    @property
    def url(self) -> str:
        """Address that names every node."""
        scheme = self.nodes[0].url.partition(":")[0]
        return f"{scheme}+cluster://{','.join(node.host for node in self.nodes)}"

    def start(self) -> None:
        """Start all nodes and make them one cluster; returns when every replica is in step."""
        for node in self.nodes:
            node.launch()
        for node in self.nodes:
            node.until(lambda node=node: node.ask("PING").startswith("+PONG"), "it answers")  # type: ignore[misc]
        for number, (primary, *_) in enumerate(self.shards):
            first, last = (SLOTS * at // len(self.shards) for at in (number, number + 1))
            primary.do("CLUSTER", "ADDSLOTSRANGE", first, last - 1)
        # Each meets each: nobody waits for gossip.
        for at, node in enumerate(self.nodes):
            for other in self.nodes[:at]:
                node.do("CLUSTER", "MEET", "127.0.0.1", other.known_port, other.bus)
        ids = {node.id for node in self.nodes}
        self._until(lambda: all(ids == set(self._seen(node)) for node in self.nodes), "every node knows all others")
        for primary, *replicas in self.shards:
            for replica in replicas:
                replica.do("CLUSTER", "REPLICATE", primary.id)
        self.until_whole()

    def is_whole(self) -> bool:
        """True when every node serves and is in step, and all know the same map of slots."""
        if not all(node.runs and "cluster_state:ok" in node.ask("CLUSTER INFO") for node in self.nodes):
            return False
        maps = [self._map(node) for node in self.nodes]
        served = {port for _, _, ports in maps[0] for port in ports}
        return all(each == maps[0] for each in maps) and len(served) == len(self.nodes) and self._in_step()

    def primary(self, shard: int) -> Node:
        """The shard's present primary, as the most nodes that run see it."""
        return max(self.shards[shard], key=lambda node: self._votes(node.port))

    def replicas(self, shard: int) -> list[Node]:
        """Nodes of the shard that are not its primary."""
        primary = self.primary(shard)
        return [node for node in self.shards[shard] if node is not primary]

    def kill(self, shard: int) -> Node:
        """kill -9 of the shard's primary; returns it."""
        node = self.primary(shard)
        node.kill()
        return node

    def until_promoted(self, shard: int) -> Node:
        """Wait until all nodes that run see a primary of the shard that runs; returns it."""
        running = [node for node in self.nodes if node.runs]
        self._until(
            lambda: any(node.runs and self._votes(node.port) == len(running) for node in self.shards[shard]),
            f"a replica of shard {shard} is promoted",
        )
        return self.primary(shard)

    def restart(self, node: Node) -> None:
        """Start a killed node again, and wait until the cluster is whole. From the main thread alone."""
        node.launch()
        self.until_whole()

    def until_whole(self) -> None:
        """Wait until `is_whole`."""
        self._until(self.is_whole, "all nodes serve, and are in step")

    def freeze(self, node: Node) -> None:
        """SIGSTOP: it keeps its connections and answers nothing, as a host that is gone."""
        node.frozen = True
        node.halt()

    def thaw(self, node: Node) -> None:
        """SIGCONT."""
        node.go_on()
        node.frozen = False

    def migrate(self, first: int, last: int, to: int) -> None:
        """Move slots `first` to `last`, all of one shard, to another one at once (Valkey 9); returns when they are
        served there.
        """
        source, target = self.primary(self.shard_of_slot(first)), self.primary(to)
        source.do("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", first, last, "NODE", target.id)
        self._until(lambda: self._slots_lie(first, last, target), f"slots {first} to {last} lie on shard {to}")

    def slots(self) -> list[tuple[int, int, int]]:
        """First and last slot of each range, and the port of its primary, as a node that runs sees it."""
        return [(first, last, ports[0]) for first, last, ports in self._map(self._any())]

    def shard_of_slot(self, slot: int) -> int:
        """Number of the shard that serves a slot."""
        for first, last, port in self.slots():
            if first <= slot <= last:
                return next(node.shard for node in self.nodes if node.port == port)
        raise RuntimeError(f"nobody serves slot {slot}")

    def shard_of(self, key: str) -> int:
        """Number of the shard that serves a key."""
        return self.shard_of_slot(self._any().do("CLUSTER", "KEYSLOT", key))

    def keys(self, pattern: str = "*") -> list[set[str]]:
        """Keys that match on the primary of each shard."""
        return [{key.decode() for key in self.primary(shard).do("KEYS", pattern)} for shard in range(len(self.shards))]

    def flush(self) -> None:
        """Delete everything."""
        for shard in range(len(self.shards)):
            self.primary(shard).do("FLUSHALL")

    def configure(self, name: str, value: object) -> None:
        """Change a setting of all nodes that run."""
        for node in self.nodes:
            if node.runs:
                node.do("CONFIG", "SET", name, value)

    def end(self) -> None:
        """End all nodes, frozen ones too."""
        for node in self.nodes:
            node.end()

    def _any(self) -> Node:
        return next(node for node in self.nodes if node.runs)

    def _votes(self, port: int) -> int:
        return sum(any(ports[0] == port for _, _, ports in self._map(node)) for node in self.nodes if node.runs)

    def _in_step(self) -> bool:
        return all(
            "master_link_status:up" in replica.ask("INFO replication")
            for shard in range(len(self.shards))
            for replica in self.replicas(shard)
        )

    def _slots_lie(self, first: int, last: int, on: Node) -> bool:
        """True when all nodes that run know the node for the owner of all the slots."""
        return all(
            {ports[0] for low, high, ports in self._map(node) if low <= last and high >= first} == {on.port}
            for node in self.nodes
            if node.runs
        )

    @staticmethod
    def _map(node: Node) -> list[tuple[int, int, Sequence[int]]]:
        """First and last slot of each range, the port of its primary, and in order those of its replicas."""
        return sorted(
            (first, last, (nodes[0][1], *sorted(each[1] for each in nodes[1:])))
            for first, last, *nodes in node.do("CLUSTER", "SLOTS")
        )

    @staticmethod
    def _seen(node: Node) -> list[str]:
        """Names of the nodes that a node knows and is connected to."""
        lines = node.do("CLUSTER", "NODES").decode().splitlines()
        return [line.split()[0] for line in lines if "handshake" not in line and " connected" in line]

    @staticmethod
    def _until(met: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not met():
            assert time.monotonic() < deadline, f"{what}: not in time"
            time.sleep(POLL_S)


@contextlib.contextmanager
def store_cluster(
    *settings: str,
    shards: int = 3,
    replicas: int = 1,
    node_timeout_ms: int = NODE_TIMEOUT_MS,
    binary: Path | None = None,
    tls: Tls | None = None,
) -> Iterator[StoreCluster]:
    """A running cluster; `settings` are of every node. `tls`: files of certificate, key and authorities.

    With TLS the nodes speak it to each other, and to clients on ports of their own; what the test asks goes without.
    """
    binary = binary or find_binary(os.environ.get("RB_TEST_STORE_BINARY"))
    cluster = StoreCluster(
        binary, *settings, shards=shards, replicas=replicas, node_timeout_ms=node_timeout_ms, tls=tls
    )
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()
