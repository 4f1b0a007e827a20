"""Options of a relay: one frozen value, checked when it is made."""

from dataclasses import dataclass, field
from pathlib import Path

from buffer_wire.connection.access import Access
from buffer_wire.errors import InvalidField
from rollout_workers.options import is_base_url, is_listen


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """Everything a relay is told. Durations are seconds. Raises InvalidField."""

    upstreams: tuple[str, ...]
    """Base URLs of publishers or relays that have the files; the fastest is asked, then the others."""

    listen: str = "127.0.0.1:8090"
    """host:port; port 0: any free one."""

    directory: Path = Path("relay_weights")
    """Directory of the files; of one relay alone."""

    max_bytes: int = 200 * 10**9
    """Most bytes of files on disk, those under way included. Those asked for least recently go first."""

    access: Access = field(default_factory=Access)
    """Token and authorities of the upstreams, and the token asked for here; what is unset comes from RB_WEIGHTS_…."""

    tls_cert: str | Path = ""
    """PEM file with the relay's certificate; none: plain http."""

    tls_key: str | Path = ""
    """PEM file with its key."""

    max_mbps: float = 0.0
    """Most megabits a second from the upstreams together; 0: no limit."""

    patience_s: float = 20.0
    """Longest time without a byte from any upstream before those who wait are sent elsewhere."""

    drain_grace_s: float = 20.0
    """Time for transfers under way after SIGTERM."""

    def __post_init__(self) -> None:
        if not self.upstreams:
            raise InvalidField("upstreams", "none", "at least one (--upstream)")
        for url in self.upstreams:
            if not is_base_url(url):
                raise InvalidField("upstreams", url, "http://host:port or https://host:port")
        if not is_listen(self.listen):
            raise InvalidField("listen", self.listen, "host:port, with a port from 0 to 65535")
        for name, least, most in (
            ("max_bytes", 1, 1 << 60),
            ("max_mbps", 0, 1e6),
            ("patience_s", 0.1, 3_600),
            ("drain_grace_s", 0, 3_600),
        ):
            if not least <= getattr(self, name) <= most:
                raise InvalidField(name, getattr(self, name), f"{least:g} to {most:g}")
