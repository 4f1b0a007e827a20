"""A client's TLS files, read again when they change, so that certificates are replaced while a client runs.

Knows no gRPC. Invariant: what is in force was read as a whole, and its certificate and key go together. Files that do
not, as while they are replaced one after the other, leave those in force that were read last. Who begins in such a
moment has none yet, so it reads again for a moment.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from buffer_wire.connection.access import SYSTEM, Access
from buffer_wire.errors import InvalidField

POLL_S = 1.0
"""Shortest time between two looks at the files."""

SETTLE_S = 0.5
"""Longest time, in seconds, for which files are read again at the start: somebody may be replacing them."""
_AGAIN_S = 0.02
_FIELDS = ("tls_ca", "tls_key", "tls_cert")

T = TypeVar("T")

Stamp = tuple[tuple[int, int, int], ...]


def settled(read: Callable[[], T], refusal: type[Exception]) -> T:
    """Result of `read`, the first reading of files; tried again while it raises `refusal`, for at most SETTLE_S."""
    until = time.monotonic() + SETTLE_S
    while True:
        try:
            return read()
        except refusal:
            if time.monotonic() >= until:
                raise
        time.sleep(_AGAIN_S)


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """Content of the files at one moment; None where none is given."""

    ca: bytes | None
    key: bytes | None
    cert: bytes | None


class TlsFiles:
    """The material of the files that `access` names, as they are now. Raises InvalidField at the first reading.

    May be used by threads and after a fork, so it has no lock: what is shared is replaced, never changed.
    """

    def __init__(self, access: Access, clock: Callable[[], float] = time.monotonic) -> None:
        self._access = access
        self._clock = clock
        self._paths = {name: Path(path) for name in _FIELDS if (path := getattr(access, name)) and str(path) != SYSTEM}
        self._in_force = settled(self._read, InvalidField)
        self._looked = clock()

    @property
    def current(self) -> TlsMaterial:
        """Material in force: the same object until the files have changed. The files are looked at once a second."""
        now = self._clock()
        if now - self._looked >= POLL_S:
            self._looked = now
            try:
                if self._stamped() != self._in_force[0]:
                    self._in_force = self._read()
            except (InvalidField, OSError):
                pass  # They are being replaced; those that were read last go on.
        return self._in_force[1]

    def _stamped(self) -> Stamp:
        found = [path.stat() for path in self._paths.values()]
        return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in found)

    def _read(self) -> tuple[Stamp, TlsMaterial]:
        try:
            before = self._stamped()
        except OSError:
            before = ()  # Reading names the file.
        material = TlsMaterial(*map(self._access.read, _FIELDS))
        self._check(material)
        if self._stamped() != before:
            raise InvalidField("tls_cert", str(self._access.tls_cert), "a file that nobody is replacing")
        return before, material

    def _check(self, material: TlsMaterial) -> None:
        import ssl  # noqa: PLC0415 - clients without TLS need not wait for it

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if material.ca is not None:
            try:
                context.load_verify_locations(cadata=material.ca.decode("ascii", "ignore"))
            except (OSError, ValueError) as error:
                raise InvalidField("tls_ca", str(self._access.tls_ca), f"a file with certificates ({error})") from None
        if material.cert is not None:
            try:
                context.load_cert_chain(self._access.tls_cert, self._access.tls_key, password=_no_passphrase)
            except (OSError, ValueError) as error:
                limit = f"the key of {self._access.tls_cert}, without a passphrase ({error})"
                raise InvalidField("tls_key", str(self._access.tls_key), limit) from None


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase")
