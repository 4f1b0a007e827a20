"""Access of clients to the store, for payloads that they write or read themselves."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Direction(StrEnum):
    """Direction in which a client moves payloads."""

    WRITE = "write"
    """The client writes new payloads, and nothing else."""
    READ = "read"
    """The client reads payloads, and nothing else."""


@dataclass(frozen=True, slots=True)
class StoreShard:
    """Shard of a cluster: where its primary is, and the slots that it serves, each range first to last."""

    host: str
    port: int
    slots: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Place at which the service itself reaches the payloads at present; `shown` names it in messages."""

    shown: str
    unix_path: str
    """Path of a unix socket; empty for TCP."""
    host: str
    port: int
    tls: bool
    database: int
    is_cluster: bool = False
    """True where payloads lie on a cluster, on `shards`; host and port say nothing then."""
    shards: Sequence[StoreShard] = ()


@dataclass(frozen=True, slots=True)
class StoreUser:
    """A user of the store that may move payloads of one run in one direction, for `valid_ms` from now on."""

    name: str
    password: str
    valid_ms: int


@dataclass(frozen=True, slots=True)
class NotedClient:
    """Facts that noting a client of a run has shown."""

    former: str
    """Reason why the client relayed when it asked before; empty where it did not."""
    secret: str
    """The run's secret; for nobody outside the service."""
    now_ms: int
    """The store's clock."""


@dataclass(frozen=True, slots=True)
class RelayingClient:
    """Client that asked for access to the store, and has the service relay payloads nevertheless."""

    client_id: str
    writes: bool
    """True for a client that writes payloads, False for one that reads them."""
    why: str
    silent_ms: int
    """Time since the client asked last."""
