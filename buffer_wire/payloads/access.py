"""Access to the payloads of a run, as a client may use it: the service's message, checked.

Invariants: what is not within the bounds is refused with its field, before anything connects. No password is shown.
"""

import ssl
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Self

from buffer_wire.errors import InvalidField
from buffer_wire.limits import CONTROL
from buffer_wire.payloads.keys import MAX_GROUP_BYTES
from buffer_wire.resp.encoding import Parts
from buffer_wire.resp.slots import SLOTS, slot_of
from rollout_buffer.v1 import payloads_pb2

MAX_ADDRESSES = 16
MAX_SHARDS = 1_000
"""Most shards of a cluster: about as many nodes as one of Valkey can have."""
MAX_UNIX_PATH_BYTES = 107
"""Longest path of a unix socket."""
MAX_HOST_CHARS = 253
MAX_NAME_CHARS = 128
MAX_PASSWORD_CHARS = 512
MAX_DATABASE = (1 << 16) - 1
MAX_AUTHORITIES_BYTES = 1 << 20
MAX_WHY_CHARS = 512
SHORTEST_MS = 1_000
"""Shortest time that an access, or an unpushed payload, is good for: with less a client would do nothing but ask."""


@dataclass(frozen=True, slots=True)
class Place:
    """Address of the store: a unix socket, or a host and a port."""

    unix_path: str
    host: str
    port: int
    tls: bool

    def __str__(self) -> str:
        return self.unix_path or f"{self.host}:{self.port}{' with TLS' if self.tls else ''}"


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """Checked access. Without `shards` the service relays, as `relayed_because` says."""

    shards: tuple[tuple[Place, ...], ...]
    """Places to try, in order, for each shard; a store that is no cluster is one of all slots."""
    slots: "array[int] | None" = field(repr=False)
    """Number of the shard that serves each slot of a cluster, -1 where none does; None: the store is no cluster."""
    username: str
    password: str = field(repr=False)
    database: int
    authorities: ssl.SSLContext | None = field(repr=False, compare=False)
    """Context for the places with TLS; None where there are none."""
    authorities_pem: bytes = field(repr=False)
    direct_from_bytes: int
    unpushed_ms: int
    valid_s: float
    relayed_because: str
    max_group_bytes: int
    """Largest payload of a group; 0: the service knows no payloads in parts."""

    @classmethod
    def checked(cls, message: payloads_pb2.PayloadAccess) -> Self:
        """The access that the service's message gives. Raises InvalidField."""
        if len(message.addresses) > MAX_ADDRESSES:
            raise InvalidField("addresses", len(message.addresses), f"at most {MAX_ADDRESSES}")
        places = tuple(_place(f"addresses[{index}]", one) for index, one in enumerate(message.addresses))
        if len(message.shards) > MAX_SHARDS or (places and message.shards):
            raise InvalidField("shards", len(message.shards), f"at most {MAX_SHARDS}, and none beside addresses")
        shards: tuple[tuple[Place, ...], ...] = (places,) if places else ()
        if message.shards:
            shards = tuple((_place(f"shards[{index}]", one.address),) for index, one in enumerate(message.shards))
        _text("relayed_because", message.relayed_because, MAX_WHY_CHARS, shortest=0)
        _at_least("valid_ms", message.valid_ms, SHORTEST_MS)
        if shards:
            _text("username", message.username, MAX_NAME_CHARS)
            if not 1 <= len(message.password) <= MAX_PASSWORD_CHARS:
                raise InvalidField("password", "***", f"1 to {MAX_PASSWORD_CHARS} characters")
            _at_least("unpushed_ms", message.unpushed_ms, SHORTEST_MS)
            if message.database > MAX_DATABASE:
                raise InvalidField("database", message.database, f"at most {MAX_DATABASE}")
        return cls(
            shards=shards,
            slots=_slots(message.shards) if message.shards else None,
            username=message.username,
            password=message.password,
            database=message.database,
            authorities=_authorities(message.authorities_pem) if any(at.tls for at in chain(*shards)) else None,
            authorities_pem=message.authorities_pem,
            direct_from_bytes=message.direct_from_bytes,
            unpushed_ms=message.unpushed_ms,
            valid_s=message.valid_ms / 1e3,
            max_group_bytes=min(message.max_group_bytes, MAX_GROUP_BYTES),
            relayed_because="" if shards else message.relayed_because or "the service names no address of the store",
        )

    @property
    def is_cluster(self) -> bool:
        """True where a command may name keys of one slot alone, and shards may get other primaries."""
        return self.slots is not None

    def shard_of(self, key: str) -> int:
        """Number of the shard on which a key lies; -1 where none serves its slot."""
        return self.slots[slot_of(key)] if self.slots is not None else 0

    def named(self, shard: int, place: Place) -> str:
        """A server as reasons name it."""
        return f"shard {shard + 1} of {len(self.shards)} at {place}" if self.is_cluster else f"the store at {place}"

    def logs_in_as(self, other: "StoreAccess") -> bool:
        """True when a connection by this access is also one by the other, where both have its place."""
        return all(getattr(self, name) == getattr(other, name) for name in _OF_CONNECTION)

    def greeting(self) -> list[Parts]:
        """Commands that a connection begins with; each is answered OK."""
        login: list[Parts] = [("AUTH", self.username, self.password)]
        return [*login, ("SELECT", self.database)] if self.database else login


_OF_CONNECTION = ("username", "password", "database", "authorities_pem")


def _slots(shards: Iterable[payloads_pb2.StoreShard]) -> "array[int]":
    owners = array("h", [-1]) * SLOTS
    for number, shard in enumerate(shards):
        for at in shard.slots:
            name, span = f"shards[{number}].slots", f"{at.first} to {at.last}"
            if not at.first <= at.last < SLOTS:
                raise InvalidField(name, span, f"in order, below {SLOTS}")
            if owners[at.first : at.last + 1].count(-1) <= at.last - at.first:
                raise InvalidField(name, span, "slots that no other range has")
            owners[at.first : at.last + 1] = array("h", [number]) * (at.last - at.first + 1)
    return owners


def _place(name: str, address: payloads_pb2.StoreAddress) -> Place:
    if address.unix_path:
        path = address.unix_path
        if not path.startswith("/") or CONTROL.search(path) or len(path.encode()) > MAX_UNIX_PATH_BYTES:
            raise InvalidField(f"{name}.unix_path", path, f"an absolute path of at most {MAX_UNIX_PATH_BYTES} bytes")
        if address.host or address.port or address.tls:
            raise InvalidField(f"{name}.host", address.host, "empty where unix_path is set, and so port and tls")
        return Place(path, "", 0, tls=False)
    _text(f"{name}.host", address.host, MAX_HOST_CHARS)
    if not 1 <= address.port <= 65_535:
        raise InvalidField(f"{name}.port", address.port, "1 to 65535")
    return Place("", address.host, address.port, address.tls)


def _text(name: str, value: str, longest: int, *, shortest: int = 1) -> None:
    if not shortest <= len(value) <= longest or CONTROL.search(value):
        raise InvalidField(name, value, f"{shortest} to {longest} characters, none of them a control character")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InvalidField(name, value, f"at least {least}")


def _authorities(pem: bytes) -> ssl.SSLContext:
    if len(pem) > MAX_AUTHORITIES_BYTES:
        raise InvalidField("authorities_pem", f"of {len(pem)} bytes", f"at most {MAX_AUTHORITIES_BYTES} bytes")
    try:
        context = ssl.create_default_context(cadata=pem.decode("ascii") if pem else None)
    except (ValueError, OSError) as error:
        raise InvalidField("authorities_pem", f"of {len(pem)} bytes", f"certificates as PEM ({error})") from None
    # The service may name the store's own certificate, whose authority it does not know.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
