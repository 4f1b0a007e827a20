"""Reading of images by reference, from a URL or a path, and what may be read at all.

What a location says is not trusted. A path leads nowhere but below the root, also by links; without a root there are no
paths. A host must have public addresses only, or be named by the rules; the connection goes to an address that was
checked. Redirects are not followed. Neither more bytes are read than an image may have, nor are pixels decoded.
"""

import contextlib
import http.client
import io
import ipaddress
import os
import socket
import ssl
import stat
import threading
import time
import warnings
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from buffer_wire.limits import MAX_BLOB_BYTES

MAX_IMAGE_PIXELS = 1 << 25
"""Largest image, in pixels: 33.5 million."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats of images, by their names in Pillow."""

_CHUNK = 1 << 16
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""Addresses behind which lies an IPv4 address."""


class ImageRefused(ValueError):
    """An image that may not be read, or is none; no repeat mends it."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"image {what}: {why}")


class ImageUnavailable(OSError):
    """An image that could not be read now."""

    def __init__(self, what: str, why: object) -> None:
        super().__init__(f"image {what} cannot be read: {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRules:
    """Rules of which images may be read."""

    root: Path | None = None
    """Root of paths; None: paths are refused."""
    hosts: frozenset[str] = frozenset()
    """Hosts that may have any address, "host" or "host:port" in any case; others have public ones only."""
    timeout_s: float = 30.0
    """Longest time for a URL, in seconds, however slowly its server answers."""

    def trusts(self, host: str, port: int) -> bool:
        """True for a host that may have any address; `host` in lower case."""
        return not {host, f"{host}:{port}"}.isdisjoint(map(str.lower, self.hosts))


def read_location(location: str, rules: ImageRules) -> bytes:
    """The bytes of the image at a URL or path. Raises ImageRefused, ImageUnavailable."""
    url = _split(location)
    return _read_path(location, rules.root) if url is None else _read_url(location, url, rules)


def check_image(data: bytes, what: str, digest: str = "") -> str:
    """SHA-256 of an encoded image, in hex, which is to be `digest` unless that is empty; `what` names it in errors.

    Raises ImageRefused for another one, for a format that is not among FORMATS, and for too many pixels.
    """
    if not 1 <= len(data) <= MAX_BLOB_BYTES:
        raise ImageRefused(what, f"{len(data)} bytes, and 1 to {MAX_BLOB_BYTES} are allowed")
    found = sha256(data).hexdigest()
    if digest and found != digest:
        raise ImageRefused(what, f"its SHA-256 is {found} in place of {digest}")
    width, height = size_of(data, what)
    if width * height > MAX_IMAGE_PIXELS:
        raise ImageRefused(what, f"{width} x {height} pixels, and at most {MAX_IMAGE_PIXELS} are allowed")
    return found


def size_of(data: bytes, what: str) -> tuple[int, int]:
    """Width and height in pixels, by the header alone. Raises ImageRefused."""
    try:
        from PIL import Image  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise ImageRefused(what, "images need the package pillow: pip install 'rollout-buffer[images]'") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # checked by whoever asks
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                return image.size
    except Exception as error:  # Pillow raises many kinds for what is damaged.
        raise ImageRefused(what, f"no image of {', '.join(FORMATS)} ({type(error).__name__}: {error})") from error


def _split(location: str) -> SplitResult | None:
    """A URL taken apart; None for a path."""
    try:
        url = urlsplit(location)
        _ = url.port
    except ValueError as error:
        raise ImageRefused(location, str(error)) from error
    if not url.scheme:
        return None
    if url.scheme not in ("http", "https"):
        raise ImageRefused(location, "neither http, https, nor a path")
    if not url.hostname or url.username is not None or url.password is not None:
        raise ImageRefused(location, "a URL with a host and without a user is asked for")
    return url


def _read_path(location: str, root: Path | None) -> bytes:
    if root is None:
        raise ImageRefused(location, "paths are refused unless a root of images is named")
    try:
        descriptor = os.open(root / location, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        # Whether there is something outside of the root is nobody's business.
        raise ImageRefused(location, "no readable file below the root of images") from error
    try:
        # Of what was opened, whatever its links lead to by now.
        opened = Path(f"/proc/self/fd/{descriptor}").readlink()
        if not opened.is_relative_to(root.resolve()) or not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ImageRefused(location, "no readable file below the root of images")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(MAX_BLOB_BYTES + 1)
    finally:
        os.close(descriptor)


def _read_url(location: str, url: SplitResult, rules: ImageRules) -> bytes:
    host = url.hostname or ""
    port = url.port or (443 if url.scheme == "https" else 80)
    deadline = time.monotonic() + rules.timeout_s
    try:
        address = _address(location, host, port, trusted=rules.trusts(host, port))
        connection = _Pinned(host, port, address, tls=url.scheme == "https", timeout_s=rules.timeout_s)
        # A socket's timeout begins anew with every byte that comes.
        timer = threading.Timer(max(deadline - time.monotonic(), 0.0), connection.cut)
        timer.daemon = True
        timer.start()
        try:
            target = f"{url.path or '/'}?{url.query}" if url.query else url.path or "/"
            connection.request("GET", target, headers={"Accept": "image/*", "User-Agent": "rollout-buffer"})
            return _body(location, connection.getresponse(), deadline)
        finally:
            timer.cancel()
            connection.close()
    except (OSError, http.client.HTTPException) as error:
        if time.monotonic() > deadline:
            raise ImageUnavailable(location, f"it did not come within {rules.timeout_s:g} s") from error
        if isinstance(error, ImageUnavailable):
            raise
        raise ImageUnavailable(location, error) from error


def _body(location: str, reply: http.client.HTTPResponse, deadline: float) -> bytes:
    if 300 <= reply.status < 500 and reply.status not in (408, 429):
        raise ImageRefused(location, f"HTTP {reply.status}; redirects are not followed")
    if reply.status != 200:
        raise ImageUnavailable(location, f"HTTP {reply.status}")
    read = bytearray()
    while chunk := reply.read(_CHUNK):
        read += chunk
        if len(read) > MAX_BLOB_BYTES:
            raise ImageRefused(location, f"more than {MAX_BLOB_BYTES} bytes")
    # A header alone makes an image of what was cut, and http.client does not mind.
    if reply.length or time.monotonic() > deadline:
        raise ImageUnavailable(location, f"its server hung up after {len(read)} bytes")
    return bytes(read)


def _address(location: str, host: str, port: int, *, trusted: bool) -> str:
    """An address of the host that may be connected to."""
    found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if not trusted and not all(map(is_public, found)):
        raise ImageRefused(location, f"host {host} has an address that is not public, and is not named as trusted")
    return found[0]


def is_public(address: str) -> bool:
    """True for an address that anybody on the internet may reach."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed in _NAT64:
            parsed = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
        elif parsed.ipv4_mapped is not None:
            parsed = parsed.ipv4_mapped
        elif parsed.sixtofour is not None:
            parsed = parsed.sixtofour
    return parsed.is_global and not parsed.is_multicast


class _Pinned(http.client.HTTPConnection):
    """Connection to one address of a host, whatever the host's name resolves to by now."""

    def __init__(self, host: str, port: int, address: str, *, tls: bool, timeout_s: float) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self.default_port = 443 if tls else 80  # what is left out of the header Host
        self._address = address
        self._context = ssl.create_default_context() if tls else None
        self._opened: socket.socket | None = None

    def connect(self) -> None:
        """Connect to the address, and with TLS check that it is the host."""
        self.sock = self._opened = socket.create_connection((self._address, self.port), self.timeout)
        if self._context is not None:
            self.sock = self._opened = self._context.wrap_socket(
                self.sock, server_hostname=self.host, do_handshake_on_connect=False
            )
            self.sock.do_handshake()

    def cut(self) -> None:
        """End what is under way, from another thread."""
        if self._opened is not None:
            with contextlib.suppress(OSError):
                self._opened.shutdown(socket.SHUT_RDWR)
