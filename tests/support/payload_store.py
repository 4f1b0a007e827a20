"""A private store with users as the service makes them, and the access that it would give out."""

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import redis

from buffer_wire.payloads.keys import key_prefix
from rollout_buffer.v1 import payloads_pb2
from tests.support.store_server import StoreServer

RUN = "r"


class PayloadStore(StoreServer):
    """A server with a writer and a reader of one run; a user's password is the name backwards."""

    def let_in(self, name: str = "w", *, rights: str = "%W~{prefix}* +set") -> None:
        """Make a user, or give one other rights."""
        self.command(f"ACL SETUSER {name} reset on >{name[::-1]} {rights.format(prefix=key_prefix(RUN))}")

    def cast_out(self, name: str) -> None:
        """Delete a user, which ends its connections."""
        self.command(f"ACL DELUSER {name}")

    def access(self, name: str = "w", **changed: object) -> payloads_pb2.PayloadAccess:
        """Access for a user, over the unix socket unless told."""
        given: dict[str, object] = {
            "addresses": [payloads_pb2.StoreAddress(unix_path=str(self.socket))],
            "username": name,
            "password": name[::-1],
            "direct_from_bytes": 1,
            "unpushed_ms": 60_000,
            "valid_ms": 600_000,
        }
        return payloads_pb2.PayloadAccess(**(given | changed))  # type: ignore[arg-type]

    def take(self, key: str) -> bytes | None:
        """Body under a key that expires, which it does no more; None where there is none."""
        client: Any = redis.Redis(unix_socket_path=str(self.socket))
        with contextlib.closing(client):
            return client.get(key) if client.persist(key) else None

    def command(self, text: str) -> bytes:
        """The beginning of the reply to a command, which is no error."""
        answer = self._ask(text)
        if not answer or answer.startswith(b"-"):
            raise RuntimeError(f"{text} was answered {answer!r}")
        return answer


@contextlib.contextmanager
def payload_store(*settings: str) -> Iterator[PayloadStore]:
    """A running store with the users `w` (writes) and `d` (reads)."""
    with PayloadStore(*settings) as store:
        store.let_in("w")
        store.let_in("d", rights="%R~{prefix}* +get +mget")
        yield store


def ask_for(
    store: PayloadStore, name: str, **changed: object
) -> Callable[[str], Awaitable[payloads_pb2.PayloadAccess]]:
    """Make what a client asks with: it is answered with access for the user."""

    async def ask(_trouble: str) -> payloads_pb2.PayloadAccess:
        return store.access(name, **changed)

    return ask
