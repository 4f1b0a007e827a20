"""Index: the servers that decide, one of them or the shards of a cluster, as what uses them sees it."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from buffer_service.domain.command import Command
from buffer_service.domain.ops import Buffer
from buffer_service.store.address import Address
from buffer_service.store.keys import Names
from buffer_service.store.transport.replication import Wanted
from buffer_wire.resp.encoding import Part
from buffer_wire.resp.protocol import RespConnection


class Index(Protocol):
    """Scripts and commands. Every wait ends in one of the transport's errors (connection.py)."""

    @property
    def address(self) -> Address:
        """The store's address."""
        ...

    @property
    def name(self) -> str:
        """The address, without its password."""
        ...

    @property
    def names(self) -> Names:
        """Keys that are of no run."""
        ...

    @property
    def is_spread(self) -> bool:
        """True where runs lie on several servers, each away by itself."""
        ...

    async def open(self) -> None:
        """Load the scripts. Raises StoreUnavailable."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...

    async def connect(self, on_push: Callable[[Any], None] | None = None) -> RespConnection:
        """A connection of its own, for messages. Raises StoreUnavailable, StoreUnsuitable."""
        ...

    async def run(self, command: Command[Any], *arguments: bytes) -> Buffer:
        """Run a command's script with these arguments; its packed reply, which waits for what it acknowledges.

        Raises StoreRolledBack beside what the transport raises.
        """
        ...

    async def wanted(self, run_id: str) -> Wanted:
        """Replicas that the run's policy has acknowledgements wait for."""
        ...

    async def tenure(self) -> str:
        """Term of the server as primary; another one whenever something may have been lost. Raises StoreUnavailable."""
        ...

    async def existing(self, run_ids: Sequence[str]) -> list[str]:
        """Those of the runs that exist."""
        ...

    async def infos(self) -> list[dict[str, str]]:
        """Fields of INFO of every server that decides."""
        ...

    async def command(self, *parts: Part) -> Any:  # noqa: ANN401 - replies are of any type
        """Send one command, of one key."""
        ...
