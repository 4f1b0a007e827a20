"""TLS of a server from files, read again when they change, so that certificates are replaced without a restart.

Invariant: a certificate, its key and, for mutual TLS, authorities are in force that fit together. Files do not fit
while they are replaced one after the other. They leave the last good ones in force, and an error in the log.
"""

import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from buffer_wire.connection.tls_files import settled

log = structlog.get_logger(__name__)

POLL_S = 1.0
"""Shortest time between two looks at the files, which only new connections cause."""

Stamp = tuple[tuple[int, int, int], ...]


class TlsRefused(ValueError):
    """TLS files that cannot be used; the message names them."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a server."""

    cert: Path
    """PEM file of the server's certificate, followed by those between it and the authority."""
    key: Path
    """PEM file of the certificate's private key, without a passphrase."""
    client_ca: Path | None = None
    """Authorities of clients' certificates, which are then required; None: clients need none."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """Paths of all the files."""
        return (self.cert, self.key) if self.client_ca is None else (self.cert, self.key, self.client_ca)


@dataclass(frozen=True, slots=True)
class Material:
    """The files' content, and a context of it; they fit together."""

    cert: bytes
    key: bytes
    client_ca: bytes | None
    context: ssl.SSLContext


class Certificates:
    """The material of files as they are now. May be asked from any thread. Raises TlsRefused at the first reading."""

    def __init__(self, files: TlsFiles, clock: Callable[[], float] = time.monotonic) -> None:
        self._files = files
        self._clock = clock
        self._lock = threading.Lock()
        self.broken = False
        """The files as they are now cannot be used; earlier ones are in force."""
        self._stamp, self._material = settled(self._read, TlsRefused)
        self._looked = clock()

    @property
    def mutual(self) -> bool:
        """True when clients need a certificate."""
        return self._files.client_ca is not None

    def material(self) -> Material:
        """Material in force, read again if the files have changed; they are looked at once a second."""
        with self._lock:
            now = self._clock()
            if now - self._looked >= POLL_S:
                self._looked = now
                self._refresh()
            return self._material

    def _refresh(self) -> None:
        try:
            if self._stamped() == self._stamp and not self.broken:
                return
            self._stamp, self._material = self._read()
            self.broken = False
            log.info("certificate read", cert=str(self._files.cert))
        except (OSError, TlsRefused) as error:
            if not self.broken:
                log.error(  # noqa: TRY400 - the traceback says nothing more
                    "TLS files are broken; those read last stay in force", why=str(error)
                )
            self.broken = True

    def _stamped(self) -> Stamp:
        found = [path.stat() for path in self._files.paths]
        return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in found)

    def _are(self, stamp: Stamp) -> bool:
        try:
            return self._stamped() == stamp
        except OSError:
            return False

    def _read(self) -> tuple[Stamp, Material]:
        files = self._files
        try:
            stamp = self._stamped()
            content = [path.read_bytes() for path in files.paths]
        except OSError as error:
            raise TlsRefused(f"TLS file {error.filename} cannot be read: {error.strerror}") from None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # A passphrase is never asked for on the terminal.
            context.load_cert_chain(files.cert, files.key, password=_no_passphrase)
        except (OSError, ValueError) as error:
            raise TlsRefused(f"certificate {files.cert} and key {files.key} do not go together: {error}") from None
        if files.client_ca is not None:
            try:
                context.load_verify_locations(cadata=content[2].decode("ascii", "ignore"))
            except (OSError, ValueError) as error:
                raise TlsRefused(f"{files.client_ca} holds no certificates: {error}") from None
            context.verify_mode = ssl.CERT_REQUIRED
        # The context has read certificate and key by itself, perhaps others than `content` holds.
        if not self._are(stamp):
            raise TlsRefused("TLS files are being replaced")
        return stamp, Material(content[0], content[1], content[2] if files.client_ca else None, context)


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase")


class RenewedContext(ssl.SSLContext):
    """A server's context that hands every new connection to the material in force at that moment."""

    _certificates: Certificates

    @classmethod
    def of(cls, certificates: Certificates) -> "RenewedContext":
        """A context over these files."""
        self = cls(ssl.PROTOCOL_TLS_SERVER)
        self._certificates = certificates
        return self

    def wrap_bio(self, *args: object, **kwargs: object) -> ssl.SSLObject:
        """Wrap a connection, as asyncio calls it, in the context that is in force."""
        return self._certificates.material().context.wrap_bio(*args, **kwargs)  # type: ignore[arg-type]
