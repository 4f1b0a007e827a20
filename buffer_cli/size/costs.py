"""Costs that sizes are computed from: each as it was measured, with the place where it stands in the results.

They are from two slow cores that others used too; a faster machine needs less. Sources are files of bench/results and
the way to the value in them.
"""

from dataclasses import dataclass

_CALLS = "calls.json > us"


@dataclass(frozen=True, slots=True)
class Call:
    """Cost of a call: µs of CPU of the rpc process and of the store, with `of` tasks, leases or groups in it."""

    rpc_us: float
    store_us: float
    of: int
    source: str


SUBMIT = Call(1602.0, 1094.0, 64, f"{_CALLS} > submit 64")
LEASE = Call(332.0, 207.5, 1, f"{_CALLS} > lease 1")
HEARTBEAT = Call(439.5, 268.6, 1, f"{_CALLS} > heartbeat 8")
"""Heartbeat with the 8 leases and the report of one engine."""
PUSH = Call(275.9, 105.0, 1, f"{_CALLS} > push 1")
"""Push of one group, beside others that 15 workers push at the same time: they go to the store in one call."""
PULL = Call(1465.0, 1348.0, 32, f"{_CALLS} > pull 32")
"""Pull of a batch, with the commit and the checkpoint of the one before."""
CALLS = {
    "submit of 64 tasks": SUBMIT,
    "lease of one task": LEASE,
    "heartbeat of an engine with 8 leases": HEARTBEAT,
    "push of one group, 16 workers at once": PUSH,
    "pull of 32 groups, with commit and checkpoint": PULL,
}


@dataclass(frozen=True, slots=True)
class Way:
    """Cost of moving payloads one way, from push to deletion: CPU seconds of service and store a GB (10^9 bytes).

    It is what a larger group costs more than a smaller one, for each byte of the difference.
    """

    service_s: float
    store_s: float
    source: str


_LARGER, _SMALLER = "peers.json > sizes > 1.2 MB > sides", "peers.json > sizes > 147 KB > sides"
DIRECT = Way(0.082, 0.461, f"{_LARGER} > ours, direct, less {_SMALLER} > ours, direct")
RELAYED = Way(1.425, 0.359, f"{_LARGER} > ours, relayed, less {_SMALLER} > ours, relayed")
WAYS = {"payloads that go directly": DIRECT, "payloads that are relayed": RELAYED}
DIRECT_FROM_BYTES = 64 << 10
"""Size of a group from which on it goes directly: the default of direct_from_bytes."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A number, and where it stands."""

    value: float
    source: str


TASK_BYTES = Measured(755, "calls.json > bytes > task")
LEASE_BYTES = Measured(73, "calls.json > bytes > lease")
GROUP_BYTES = Measured(773, "calls.json > bytes > group")
"""Bytes of the index for each pending task, for its lease, and for a group beside its payload."""

CONNECTIONS = Measured(2.2, "rebalance.json > connections, over workers")
"""Connections that a worker has, with those that are old and those that are new at the age of connections."""
TOLD_US = Measured(29, "fleet.json > cases > fleet of 10,000, one replica > told_us_cpu_each")
"""µs of CPU of the rpc process for each watch that is told of published weights."""
WORKER_KB = Measured(107, "fleet.json > cases > workers > rss_kb_each")
"""Memory of the rpc process for each worker, in KB: its connections, watch and push stream."""
EACH = {
    "bytes of a pending task": TASK_BYTES,
    "bytes of a lease": LEASE_BYTES,
    "bytes of a group, beside its payload": GROUP_BYTES,
    "connections of a worker": CONNECTIONS,
    "µs of the rpc process for each worker and publish": TOLD_US,
    "KB of the rpc process for each worker": WORKER_KB,
}
