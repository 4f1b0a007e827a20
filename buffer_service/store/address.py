"""Addresses of stores: unix:///path, redis://, rediss:// and valkey(s)://; with +sentinel behind the scheme that of
the primary that Sentinels know by its name. Of clusters, for runs or payloads: redis+cluster:// and rediss+cluster://.
"""

import dataclasses
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from buffer_wire.errors import StoreUnavailable, StoreUnsuitable

DEFAULT_PORT = 6379
DEFAULT_SENTINEL_PORT = 26379
SENTINEL = "+sentinel"
CLUSTER = "+cluster"
_SCHEMES = {"redis": False, "valkey": False, "rediss": True, "valkeys": True, "unix": False}
_SENTINEL_OPTIONS = {"sentinel_username", "sentinel_password"}
_CLUSTER_URL = re.compile(rf"([a-z]+){re.escape(CLUSTER)}://([^/?#]+)/?")
_SENTINEL_URL = re.compile(rf"([a-z]+){re.escape(SENTINEL)}://([^/?#]*)([^?#]*)(?:\?([^#]*))?")


@dataclass(frozen=True, slots=True)
class Sentinels:
    """Sentinels to ask for the primary of a service, and the credentials for them."""

    hosts: tuple[tuple[str, int], ...]
    service: str
    username: str = ""
    password: str = ""


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a store, and what is needed to enter it. `shown` is for errors and logs: no password."""

    shown: str
    path: str
    """Path of the unix socket; empty for TCP."""
    host: str
    port: int
    tls: bool
    username: str
    password: str
    database: int
    ca: Path | None = None
    """PEM file of the authorities of servers and Sentinels with TLS; None: the system's."""
    sentinels: Sentinels | None = None
    """Sentinels that know host and port; these are empty and 0 until `at` fills them in."""
    nodes: tuple[tuple[str, int], ...] = ()
    """Nodes of a cluster that are asked for the others; host and port as with Sentinels."""

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Raises StoreUnsuitable for what is no store's address."""
        shown = redacted(url)
        try:
            return _parse_sentinels(url, shown) if SENTINEL in url.partition("://")[0] else _parse_one(url, shown)
        except ValueError as error:
            raise StoreUnsuitable(
                shown,
                "its address must be unix:///path, redis://host:port/database, rediss://… or valkey://…, or "
                "redis+sentinel://host:port,host:port/service/database, or redis+cluster://host:port,host:port",
            ) from error

    @classmethod
    def parse_cluster(cls, url: str) -> "Address":
        """Raises StoreUnsuitable for what is no cluster's address."""
        shown = redacted(url)
        try:
            return _parse_cluster(url, shown)
        except ValueError as error:
            raise StoreUnsuitable(
                shown, "its address must be redis+cluster://host:port,host:port or rediss+cluster://…"
            ) from error

    def at(self, host: str, port: int) -> "Address":
        """The address of the primary that the Sentinels, or the cluster's nodes, have named."""
        # Both: an error must say which server it was, and whose.
        shown = f"{host}:{port} ({'the cluster' if self.nodes else self.shown})"
        return dataclasses.replace(self, shown=shown, host=host, port=port, sentinels=None, nodes=())

    def greeting(self) -> list[tuple[str | int, ...]]:
        """Commands that a new connection begins with."""
        commands: list[tuple[str | int, ...]] = []
        if self.password:
            commands.append(("AUTH", *([self.username] if self.username else []), self.password))
        if self.database:
            commands.append(("SELECT", self.database))
        return commands

    def ssl_context(self) -> ssl.SSLContext | None:
        """TLS context for rediss://, else None. Raises StoreUnavailable where the authorities' file cannot be read."""
        try:
            return ssl.create_default_context(cafile=self.ca) if self.tls else None
        except OSError as error:
            raise StoreUnavailable(self.shown, f"its certificate authorities in {self.ca}: {error}") from error


def is_cluster(url: str) -> bool:
    """True for the address of a cluster."""
    return url.partition("://")[0].endswith(CLUSTER)


def redacted(url: str) -> str:
    """The address without its passwords."""
    without = re.sub(r"^([^:/?]+://[^:@/]*:).*@", r"\1***@", url)
    return re.sub(r"(password=)[^&]*", r"\1***", without)


def _parse_one(url: str, shown: str) -> Address:
    parts = urlsplit(url)
    unix = parts.scheme == "unix"
    if parts.scheme not in _SCHEMES or not (parts.path if unix else parts.hostname):
        raise ValueError(parts.scheme)
    return Address(
        shown=shown,
        path=unquote(parts.path) if unix else "",
        host=parts.hostname or "",
        port=parts.port or DEFAULT_PORT,
        tls=_SCHEMES[parts.scheme],
        username=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=0 if unix else _database(parts.path.strip("/")),
    )


def _parse_sentinels(url: str, shown: str) -> Address:
    # Not by urlsplit: since CVE-2025-0938 was mended it refuses a bracketed host behind others.
    parts = _SENTINEL_URL.fullmatch(url)
    if parts is None:
        raise ValueError(url)
    scheme, authority, path, query = parts.groups(default="")
    credentials, _, hosts = authority.rpartition("@")
    username, _, password = credentials.partition(":")
    service, _, database = path.strip("/").partition("/")
    options = dict(parse_qsl(query, strict_parsing=True)) if query else {}
    if scheme not in _SCHEMES or scheme == "unix" or not hosts or not service or options.keys() - _SENTINEL_OPTIONS:
        raise ValueError(scheme)
    return Address(
        shown=shown,
        path="",
        host="",
        port=0,
        tls=_SCHEMES[scheme],
        username=unquote(username),
        password=unquote(password),
        database=_database(database),
        sentinels=Sentinels(
            hosts=tuple(_host(host) for host in hosts.split(",")),
            service=unquote(service),
            username=options.get("sentinel_username", ""),
            password=options.get("sentinel_password", ""),
        ),
    )


def _parse_cluster(url: str, shown: str) -> Address:
    parts = _CLUSTER_URL.fullmatch(url)
    if parts is None or parts[1] not in _SCHEMES or parts[1] == "unix":
        raise ValueError(url)
    credentials, _, hosts = parts[2].rpartition("@")
    username, _, password = credentials.partition(":")
    return Address(
        shown=shown,
        path="",
        host="",
        port=0,
        tls=_SCHEMES[parts[1]],
        username=unquote(username),
        password=unquote(password),
        database=0,
        nodes=tuple(_host(host, DEFAULT_PORT) for host in hosts.split(",")),
    )


def _host(text: str, port: int = DEFAULT_SENTINEL_PORT) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(text)
    return parts.hostname, parts.port or port


def _database(text: str) -> int:
    if text and not text.isdigit():
        raise ValueError(text)
    return int(text or 0)
