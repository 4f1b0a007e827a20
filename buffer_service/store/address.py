"""Addresses of stores: unix:///path, redis://, rediss://, and valkey(s):// for the same."""

import ssl
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from buffer_wire.errors import StoreUnsuitable

DEFAULT_PORT = 6379
_SCHEMES = {"redis": False, "valkey": False, "rediss": True, "valkeys": True, "unix": False}


@dataclass(frozen=True, slots=True)
class Address:
    """Where a store is and how to enter it. `shown` is for errors and logs: no password."""

    shown: str
    path: str
    """Of the unix socket; empty for TCP."""
    host: str
    port: int
    tls: bool
    username: str
    password: str
    database: int

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Raises StoreUnsuitable for what is no store's address."""
        shown = redacted(url)
        try:
            parts = urlsplit(url)
            port = parts.port or DEFAULT_PORT
        except ValueError as error:
            raise _unusable(shown) from error
        if parts.scheme not in _SCHEMES or not (parts.path if parts.scheme == "unix" else parts.hostname):
            raise _unusable(shown)
        unix = parts.scheme == "unix"
        database = "" if unix else parts.path.strip("/")
        if database and not database.isdigit():
            raise _unusable(shown)
        return cls(
            shown=shown,
            path=unquote(parts.path) if unix else "",
            host=parts.hostname or "",
            port=port,
            tls=_SCHEMES[parts.scheme],
            username=unquote(parts.username or ""),
            password=unquote(parts.password or ""),
            database=int(database or 0),
        )

    def greeting(self) -> list[tuple[str | int, ...]]:
        """Commands that a new connection begins with."""
        commands: list[tuple[str | int, ...]] = []
        if self.password:
            commands.append(("AUTH", *([self.username] if self.username else []), self.password))
        if self.database:
            commands.append(("SELECT", self.database))
        return commands

    def ssl_context(self) -> ssl.SSLContext | None:
        """For rediss://: the system's certificate authorities."""
        return ssl.create_default_context() if self.tls else None


def redacted(url: str) -> str:
    """The address without its password."""
    scheme, separator, rest = url.partition("://")
    credentials, at, host = rest.partition("/")[0].rpartition("@")
    if not at or not separator:
        return url
    user = credentials.partition(":")[0]
    path = rest[len(credentials) + len(at) + len(host) :]
    return urlunsplit(SplitResult(scheme, f"{user}:***@{host}", path, "", ""))


def _unusable(shown: str) -> StoreUnsuitable:
    return StoreUnsuitable(
        shown, "its address must be unix:///path, redis://host:port/database, rediss://… or valkey://…"
    )
