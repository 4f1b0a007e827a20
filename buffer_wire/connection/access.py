"""Access of a client: its token, and TLS. Knows no gRPC; `buffer_wire.connection.channels` makes channels of it.

Invariants: a token is never shown and never travels in plain text to another machine, unless `insecure` says so. A
token from a file is read again when the file changes, so it can be replaced while a trainer runs.
"""

import ipaddress
import os
import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from buffer_wire.errors import InvalidField

POLL_S = 1.0
"""Shortest time between two looks at a token file."""

SYSTEM = "system"
"""Value of `tls_ca` that means the certificate authorities that gRPC trusts by itself."""

SERVICE, WEIGHTS = "RB_", "RB_WEIGHTS_"
"""Beginnings of the variables of an access: to the service, and to whoever serves weights."""

_VARIABLES = {
    "token": "TOKEN",
    "token_file": "TOKEN_FILE",
    "tls_ca": "TLS_CA",
    "tls_cert": "TLS_CLIENT_CERT",
    "tls_key": "TLS_CLIENT_KEY",
    "tls_server_name": "TLS_SERVER_NAME",
}
_INSECURE = "RB_INSECURE"

ENVIRONMENT = frozenset(prefix + name for prefix in (SERVICE, WEIGHTS) for name in _VARIABLES.values())
"""Variables that a program has to take out for a child that talks to something else than the service."""


_TARGET = re.compile(r"(dns|ipv4|ipv6|unix|unix-abstract|xds|vsock):\S+|(\[[0-9a-fA-F:.%\w]+\]|[^\s:/\[\]]+):\d{1,5}")
"""Addresses that gRPC connects to: host:port, or a target with a scheme. gRPC reads a bare name as port 443."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Access of a client to a service: its token, and TLS.

    Fields that are unset are taken from the environment: RB_TOKEN or RB_TOKEN_FILE, RB_TLS_CA, RB_TLS_CLIENT_CERT,
    RB_TLS_CLIENT_KEY, RB_TLS_SERVER_NAME, RB_INSECURE.
    """

    token: str = field(default="", repr=False)
    """Token that is sent with every call; empty: that of `token_file`."""
    token_file: str | Path = ""
    """File whose only line is the token; read again when it changes, and once when the service refuses the token."""
    tls_ca: str | Path = ""
    """PEM file of the authorities that may have signed the service's certificate, or "system"; empty: plain text."""
    tls_cert: str | Path = ""
    """PEM file with the client's own certificate chain, where the service asks for one."""
    tls_key: str | Path = ""
    """PEM file with the private key of the client's certificate."""
    tls_server_name: str = ""
    """Name that the service's certificate must bear, where it is not the host of the address."""
    insecure: bool = False
    """Send the token in plain text to other machines too."""

    def effective(self, prefix: str = SERVICE) -> Self:
        """Fill unset fields from the environment. Raises InvalidField for fields that contradict each other."""
        found: dict[str, object] = {}
        given_token = self.token or self.token_file
        for name, variable in _VARIABLES.items():
            if not getattr(self, name) and not (given_token and name.startswith("token")):
                found[name] = os.environ.get(prefix + variable, "")
        chosen = replace(self, **found) if found else self  # type: ignore[arg-type]  # all of them are text
        if not chosen.insecure and os.environ.get(_INSECURE, "").lower() in {"1", "true", "yes", "on"}:
            chosen = replace(chosen, insecure=True)
        chosen.check()
        return chosen

    @property
    def over_tls(self) -> bool:
        """True when connections use TLS."""
        return bool(self.tls_ca)

    def read(self, name: str) -> bytes | None:
        """Content of the file that the field `name` gives; None when it gives none. Raises InvalidField."""
        path = getattr(self, name)
        if not path or str(path) == SYSTEM:
            return None
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise InvalidField(name, str(path), f"a file that can be read ({error.strerror})") from None

    def check_target(self, target: str) -> None:
        """Raises InvalidField for what is no address, and when a token would go to another machine in plain text."""
        check_address(target)
        if (self.token or self.token_file) and not (self.over_tls or self.insecure or stays_here(target)):
            raise InvalidField(
                "tls_ca", "", f"set, for the token would go to {target} in plain text; or say insecure (RB_INSECURE=1)"
            )

    def check(self) -> None:
        """Check the fields. Raises InvalidField where they contradict each other."""
        if self.token and self.token_file:
            raise InvalidField("token_file", str(self.token_file), "unset where a token is given (RB_TOKEN)")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise InvalidField("tls_key", str(self.tls_key), "given together with tls_cert")
        for name in ("tls_cert", "tls_server_name"):
            if getattr(self, name) and not self.tls_ca:
                raise InvalidField("tls_ca", "", f'set, to a file or "{SYSTEM}", where {name} is')
        if self.token and not (self.token.isascii() and self.token.isprintable() and " " not in self.token):
            raise InvalidField("token", "***", "printable ASCII without spaces")


def check_address(target: str) -> None:
    """Check the target. Raises InvalidField for what is neither host:port nor another target of gRPC's."""
    if not _TARGET.fullmatch(target):
        raise InvalidField("address", target, "host:port of the service's gRPC, such as 127.0.0.1:50051")


def stays_here(target: str) -> bool:
    """True for a gRPC target that only this machine serves."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    scheme, _, rest = target.partition(":")
    if scheme in {"dns", "ipv4", "ipv6"} and rest:
        target = rest.rpartition("/")[2]
    host = target.rpartition(":")[0] if not target.endswith("]") else target
    host = host.removeprefix("[").removesuffix("]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class TokenSource:
    """The token of one client, as it is now. May be used by threads: what they share is replaced, never changed."""

    def __init__(self, access: Access) -> None:
        self._file = Path(access.token_file) if access.token_file else None
        self._token = access.token
        self._stamp: tuple[int, int, int] | None = None
        self._looked = 0.0
        if self._file is not None:
            self._read()

    @property
    def current(self) -> str:
        """The token to send; empty for none."""
        if self._file is not None and time.monotonic() - self._looked >= POLL_S:
            self._look()
        return self._token

    def renew(self, refused: str) -> bool:
        """Read the file again at once; True when there is another token than the one that was refused."""
        if self._file is not None:
            self._stamp = None
            self._look()
        return self._token != refused

    def _look(self) -> None:
        self._looked = time.monotonic()
        try:
            if self._stamped() != self._stamp:
                self._read()
        except (InvalidField, OSError):
            return  # It is being replaced; the one that was read last goes on.

    def _stamped(self) -> tuple[int, int, int]:
        if self._file is None:
            raise FileNotFoundError
        found = self._file.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> None:
        self._looked = time.monotonic()
        try:
            stamp = self._stamped()
            token = self._file.read_text(encoding="ascii").strip() if self._file is not None else ""
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidField("token_file", str(self._file), f"a file that can be read ({error})") from None
        if not token or not token.isprintable() or " " in token:
            raise InvalidField("token_file", str(self._file), "a file whose only line is a token")
        self._token, self._stamp = token, stamp
