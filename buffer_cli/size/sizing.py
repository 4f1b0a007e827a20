"""Sizes of store and service for a fleet of engines: a pure function of the fleet, the machines and measured costs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from buffer_cli.size import costs
from buffer_wire.errors import InvalidField

BUSY = 0.6
"""Share of a core, a network or a bound that is planned with: the rest is for bursts, failovers and slow moments."""
USABLE = 2 / 3
"""Part of a machine's memory that maxmemory may be: the rest is for buffers, and for the fork that rewrites files."""
MAX_CONNECTIONS = 4_096
"""Connections that an rpc process is planned with: a quarter of max_connections, so that others may end."""
RPC_PROCESSES = 4
"""rpc processes of a replica."""
LEAST_REPLICAS = 2
LEAST_SHARDS = 3
"""Primaries of a cluster of which one may be lost: the others are a majority."""
RPC_PROCESS_BYTES = 612 << 20
"""Memory that an rpc process may take before any worker comes: 100 MiB, 1.5 times blocked_bytes, and recent_bytes."""
HEARTBEAT_S = 20.0
"""Period of heartbeats, with which reports come: a third of lease_ttl_ms."""
_MAY_BE_0, _ABOVE_0 = ("queue_factor", "retained_steps"), 1e-9
PENDING_TASKS = 10_000
"""Tasks that are submitted ahead: the default of max_pending_tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Engines of one run, and what they make."""

    gpus: int
    """GPUs that generate."""
    tokens_per_s: float
    """Tokens that one GPU generates a second."""
    bytes_per_token: float = 9.0
    """Bytes of a payload for each token: 9 for ids, log-probabilities and mask."""
    length: float = 2_000.0
    """Tokens of a sample, the prompt's included."""
    group_size: int = 8
    """Samples of a group."""
    gpus_per_engine: int = 1
    engines_per_worker: int = 1
    groups_per_engine: int = 16
    """Groups in flight on an engine."""
    groups_per_batch: int = 512
    """Groups of a train step."""
    queue_factor: float = 1.0
    """Batches that the queue has room for."""
    retained_steps: int = 64
    """Steps whose groups are kept for a replay: those since the trainer's last checkpoint, or the policy's."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value, least = getattr(self, each.name), 0 if each.name in _MAY_BE_0 else _ABOVE_0
            if not least <= value < math.inf:
                raise InvalidField(each.name, str(value), "0 or more" if least == 0 else "above 0")

    @property
    def engines(self) -> int:
        """Engines, whole ones."""
        return math.ceil(self.gpus / self.gpus_per_engine)

    @property
    def workers(self) -> int:
        """Workers, whole ones."""
        return math.ceil(self.engines / self.engines_per_worker)

    @property
    def publishes_per_s(self) -> float:
        """Versions that are published a second: one a step, at most one, since no trainer of such a fleet has more."""
        return min(1.0, self.groups_per_s / self.groups_per_batch)

    @property
    def group_bytes(self) -> float:
        """Size of a group's payload."""
        return self.group_size * self.length * self.bytes_per_token

    @property
    def groups_per_s(self) -> float:
        """Groups that all engines finish a second."""
        return self.gpus * self.tokens_per_s / (self.group_size * self.length)

    @property
    def bytes_per_s(self) -> float:
        """Bytes of payloads that come in a second; as many go out."""
        return self.groups_per_s * self.group_bytes

    @property
    def held_groups(self) -> float:
        """Groups that lie in the store at most: queued, delivered and retained."""
        return self.groups_per_batch * (self.queue_factor + 1 + self.retained_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Machines of the store."""

    memory_gb: float = 64.0
    """Memory of each, in GB (10^9 bytes)."""
    network_gbps: float = 25.0
    """Network of each, in Gbit/s each way."""
    store_replicas: int = 1
    """Replicas of each primary."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a part, as a number of what carries it: cores of a thread, memories or networks of a machine."""

    name: str
    needed: float
    """1 is as much as is planned with."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """Sizes that a fleet needs."""

    fleet: Fleet
    direct: bool
    """True when payloads go directly between clients and store."""
    decision_cores: float
    """Cores of the one thread that decides."""
    index: Sequence[Load]
    """Loads of the one store that decides, payloads left out."""
    payloads: Sequence[Load]
    """Loads of all payloads."""
    shards: int
    """Primaries for payloads; 0: they lie with the index."""
    held_bytes: float
    """Bytes of payloads that lie in the store at most."""
    index_bytes: float
    service_cores: float
    connections: int
    """Open connections of all workers."""
    rpc_processes: int
    replicas: int
    """Replicas of the service."""
    replica_bytes: float
    """Memory of each."""

    @property
    def index_load(self) -> Load:
        """Largest load of the store that decides."""
        with_payloads = zip(self.index, self.payloads, strict=True)
        if not self.shards:
            return _largest(Load(one.name, one.needed + other.needed) for one, other in with_payloads)
        return _largest(self.index)

    @property
    def fits(self) -> bool:
        """False when the one store that decides has more to do than is planned with."""
        return self.index_load.needed <= 1

    @property
    def largest_gpus(self) -> int:
        """GPUs at which the decisions of one run fill what is planned with, with payloads elsewhere."""
        return int(self.fleet.gpus / _largest(self.index).needed)

    @property
    def limit(self) -> str:
        """Resource that gives out first."""
        if not self.fits:
            return "decisions of one run"
        if self.shards:
            return f"{_largest(self.payloads).name} for payloads"
        return f"{self.index_load.name} of the store"


def size(fleet: Fleet, machines: Machines) -> Sizing:
    """Size store and service."""
    direct = fleet.group_bytes >= costs.DIRECT_FROM_BYTES
    way = costs.DIRECT if direct else costs.RELAYED
    gb_per_s = fleet.bytes_per_s / 1e9
    held_bytes = fleet.held_groups * fleet.group_bytes
    in_flight = fleet.engines * fleet.groups_per_engine
    index_bytes = (
        (PENDING_TASKS + in_flight) * costs.TASK_BYTES.value
        + in_flight * costs.LEASE_BYTES.value
        + fleet.held_groups * costs.GROUP_BYTES.value
    )
    rpc_cores, index_cores = _cores_of_calls(fleet)
    index = _loads(index_cores, index_bytes, 0.0, machines)
    payloads = _loads(gb_per_s * way.store_s, held_bytes, gb_per_s, machines)
    together = _largest(Load(one.name, one.needed + other.needed) for one, other in zip(index, payloads, strict=True))
    service_cores = rpc_cores + gb_per_s * way.service_s
    service_cores += fleet.publishes_per_s * fleet.workers * costs.TOLD_US.value / 1e6
    connections = round(fleet.workers * costs.CONNECTIONS.value)
    rpc_processes = math.ceil(max(service_cores, connections / MAX_CONNECTIONS) / BUSY)
    replicas = max(LEAST_REPLICAS, math.ceil(rpc_processes / RPC_PROCESSES))
    return Sizing(
        fleet=fleet,
        direct=direct,
        decision_cores=index_cores,
        index=index,
        payloads=payloads,
        shards=0 if together.needed <= 1 else max(LEAST_SHARDS, math.ceil(_largest(payloads).needed)),
        held_bytes=held_bytes,
        index_bytes=index_bytes,
        service_cores=service_cores,
        connections=connections,
        rpc_processes=rpc_processes,
        replicas=replicas,
        replica_bytes=RPC_PROCESSES * RPC_PROCESS_BYTES + fleet.workers * costs.WORKER_KB.value * 1e3 / replicas,
    )


def _cores_of_calls(fleet: Fleet) -> tuple[float, float]:
    """Cores of the service and of the store that all calls take, without the bytes of payloads."""
    per_s = {call: fleet.groups_per_s / call.of for call in (costs.SUBMIT, costs.LEASE, costs.PUSH, costs.PULL)}
    per_s[costs.HEARTBEAT] = fleet.engines / HEARTBEAT_S
    return (
        sum(often * call.rpc_us for call, often in per_s.items()) / 1e6,
        sum(often * call.store_us for call, often in per_s.items()) / 1e6,
    )


def _loads(cores: float, held_bytes: float, gb_per_s: float, machines: Machines) -> list[Load]:
    """Loads of one thread, of memory and of the network; a primary sends to the readers and to each replica."""
    network_gb_per_s = machines.network_gbps / 8
    return [
        Load("CPU", cores / BUSY),
        Load("memory", held_bytes / (machines.memory_gb * 1e9 * USABLE)),
        Load("network", gb_per_s * (1 + machines.store_replicas) / (network_gb_per_s * BUSY)),
    ]


def _largest(loads: Iterator[Load] | Sequence[Load]) -> Load:
    return max(loads, key=lambda load: load.needed)
