"""Connections of the blocking client to the service: two channels for each process that uses the client.

Invariants: a process talks over connections that it made itself. Those that it inherits from its parent stay open and
unused, because gRPC would end the parent's with them.
"""

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from buffer_wire.connection.access import TokenSource
from buffer_wire.connection.channels import Connector
from buffer_wire.revisions import Revisions
from buffer_wire.tracing import process as tracing
from trainer_client.client.driver import ClientOptions
from trainer_client.forks import CALLS

if TYPE_CHECKING:
    from buffer_wire.payloads.reader import PayloadReader

_SINGLE_THREADED = ("SingleThreadedUnaryStream", 1)
"""Channel option: the thread that pulls reads the stream itself. A thread of gRPC's own would be inside gRPC at any
fork."""


@dataclass(frozen=True, slots=True)
class OfProcess:
    """Connections of one process, and what it knows."""

    control: grpc.Channel
    """Channel for small messages."""
    bulk: grpc.Channel
    """Channel for batches."""
    revisions: Revisions
    """Highest revision seen of each run."""
    readers: "dict[tuple[str, int], PayloadReader]" = field(default_factory=dict)
    """Readers of the store, by run and rank."""

    def close(self) -> None:
        """Close all of them; calls under way fail, reads end first."""
        self.control.close()
        self.bulk.close()
        for reader in list(self.readers.values()):
            reader.close()


class Connections:
    """Connections to `target`, made at once in this process and at the first use in its children."""

    def __init__(self, target: str, options: ClientOptions) -> None:
        with CALLS.under_way():
            # A fork waits until spans that gRPC is delivering are.
            tracing.start("rollout-trainer", around=CALLS.under_way, owns_process=False)
        self._connector = Connector(target, options, options.channel_options())
        self._closed = False
        self._by_pid = {os.getpid(): self._connect()}

    @property
    def tokens(self) -> TokenSource:
        """Source of the token that calls carry."""
        return self._connector.tokens

    @property
    def mine(self) -> OfProcess:
        """Those of this process. Raises UsedAfterFork in a child whose fork gRPC did not survive."""
        pid = os.getpid()
        known = self._by_pid.get(pid)
        if known is not None:
            return known
        made = self._connect()
        # No lock: another thread of the parent may have held it at the fork.
        mine = self._by_pid.setdefault(pid, made)
        if mine is not made or self._closed:
            made.close()
        return mine

    def close(self) -> None:
        """Close this process's connections."""
        self._closed = True
        mine = self._by_pid.get(os.getpid())
        if mine is not None:
            mine.close()

    def _connect(self) -> OfProcess:
        with CALLS.under_way():
            connect = self._connector.blocking
            return OfProcess(connect(_SINGLE_THREADED), connect(_SINGLE_THREADED), Revisions())
