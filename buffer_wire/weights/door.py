"""Weights over http, as all who serve them share it: paths by digest, who is let in, and TLS.

Knows no server: trainer, worker and relay each bring their own. Invariants: where a token is asked for, nothing is said
to who does not have it. A certificate or token that is replaced on disk is in force within a second.
"""

import hmac
import os
import re
import ssl
import time
from pathlib import Path

from buffer_wire.connection.access import POLL_S, WEIGHTS, Access, TokenSource
from buffer_wire.connection.tls_files import settled
from buffer_wire.errors import InvalidField

CHALLENGE = 'Bearer realm="rollout-buffer weights"'
"""Value of WWW-Authenticate for who brings no token, or another one."""

_BY_DIGEST = re.compile(r"sha256/([0-9a-f]{64})")
_BEARER = "Bearer "


def path_of(sha256: bytes) -> str:
    """Path, below a relay's or publisher's address, of the file with this SHA-256."""
    return f"sha256/{sha256.hex()}"


def digest_in(path: str) -> str | None:
    """SHA-256, in hexadecimal, that a path without its leading slash names; None for another path."""
    found = _BY_DIGEST.fullmatch(path)
    return found[1] if found is not None else None


def bearer(token: str) -> str:
    """Value of the header Authorization with which a token is sent."""
    return _BEARER + token


class WeightsDoor:
    """Door of a server of weights: the token that callers need, and its certificate.

    `access` gives the token, `tls_cert` and `tls_key` are PEM files. What they leave out comes from RB_WEIGHTS_TOKEN or
    RB_WEIGHTS_TOKEN_FILE, RB_WEIGHTS_TLS_CERT, RB_WEIGHTS_TLS_KEY. Without a token everybody is let in; without a
    certificate it is plain http. Raises InvalidField for files that cannot be read or do not go together.
    """

    def __init__(self, access: Access | None = None, *, tls_cert: str | Path = "", tls_key: str | Path = "") -> None:
        tls_cert = tls_cert or os.environ.get(f"{WEIGHTS}TLS_CERT", "")
        tls_key = tls_key or os.environ.get(f"{WEIGHTS}TLS_KEY", "")
        if bool(tls_cert) != bool(tls_key):
            raise InvalidField("tls_key", str(tls_key), "given together with tls_cert")
        self._tokens = TokenSource((access or Access()).effective(WEIGHTS))
        self._files = [Path(path) for path in (tls_cert, tls_key) if path]
        self._looked = time.monotonic()
        self._stamp = self._stamped() if self._files else ()
        self.tls = settled(self._fresh, InvalidField) if self._files else None
        """Context for connections; None: plain http."""

    @property
    def scheme(self) -> str:
        """Scheme of its URLs."""
        return "http" if self.tls is None else "https"

    @property
    def asks(self) -> bool:
        """True where a token is needed."""
        return bool(self._tokens.current)

    def admits(self, authorization: str | None) -> bool:
        """Say whether a caller with this header Authorization may read."""
        token = self._tokens.current
        given = (authorization or "").encode("latin-1", "replace")
        return not token or hmac.compare_digest(given, bearer(token).encode())

    def renew(self) -> None:
        """Take a certificate that was replaced, for connections to come. The files are looked at once a second."""
        if self.tls is None or time.monotonic() - self._looked < POLL_S:
            return
        self._looked = time.monotonic()
        try:
            stamp = self._stamped()
            if stamp != self._stamp:
                # Tried apart: a failed load may leave a certificate without its key.
                self._fresh()
                self._loaded(self.tls)
                self._stamp = stamp
        except (InvalidField, OSError):
            pass  # They are being replaced; those that were read last go on.

    def _stamped(self) -> tuple[tuple[int, int, int], ...]:
        try:
            found = [path.stat() for path in self._files]
        except OSError as error:
            raise InvalidField("tls_cert", str(error.filename), f"a file that can be read ({error.strerror})") from None
        return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in found)

    def _fresh(self) -> ssl.SSLContext:
        return self._loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def _loaded(self, context: ssl.SSLContext) -> ssl.SSLContext:
        cert, key = self._files
        try:
            context.load_cert_chain(cert, key, password=_no_passphrase)
        except (OSError, ValueError) as error:
            raise InvalidField("tls_key", str(key), f"the key of {cert}, without a passphrase ({error})") from None
        return context


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase")
