"""host:port, as settings and messages write it."""

import ipaddress
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Address:
    """Address on which something listens; an IPv6 host is written in brackets."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `host:port` or `[v6]:port`. Raises ValueError saying what is wrong."""
        host, colon, port = text.rpartition(":")
        if not colon or not host:
            raise ValueError(f"address {text!r} is not host:port")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ValueError(f"address {text!r}: write an IPv6 host in brackets, [::1]:50051")
        if not port.isdecimal() or int(port) > 65_535:
            raise ValueError(f"address {text!r}: the port is a number from 0 to 65535")
        return cls(host, int(port))

    @property
    def is_wildcard(self) -> bool:
        """True for a host that means every address of this machine."""
        return self.host in {"0.0.0.0", "::", "*"}  # noqa: S104 - compared, not bound

    @property
    def is_loopback(self) -> bool:
        """True for localhost and loopback numbers, which only this machine reaches; no name is looked up."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
