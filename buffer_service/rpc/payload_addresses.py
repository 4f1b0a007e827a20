"""Addresses of the store that a client is told, by where the client is and what the settings allow.

Invariants: a client elsewhere is told no path and no loopback address. It is told no address without TLS where the
service itself has TLS, unless the settings allow that by name.
"""

import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import unquote

from buffer_service.domain.ops import StorePlace
from buffer_service.observability.addresses import Address
from buffer_service.rpc_settings import RpcSettings
from rollout_buffer.v1 import payloads_pb2 as pb


@dataclass(frozen=True, slots=True)
class Offer:
    """Addresses for one client, the best one first; `why` says why there are none."""

    addresses: tuple[pb.StoreAddress, ...]
    authorities_pem: bytes = b""
    why: str = ""


def offer(settings: RpcSettings, place: StorePlace, peer: str) -> Offer:
    """Addresses for a client whose connection gRPC calls `peer`."""
    local = is_local(peer)
    addresses = []
    if place.unix_path and local:
        addresses.append(pb.StoreAddress(unix_path=place.unix_path))
    named = settings.payload_address or settings.payload_listen
    at = Address.parse(named) if named else Address(place.host, place.port)
    # An embedded store that listens has the service's certificate.
    tls = settings.tls_cert is not None if settings.payload_listen else place.tls
    why = ""
    if not at.host:
        why = (
            "the store listens on the service's host alone (--payload-listen)"
            if place.unix_path
            else f"nobody has named a primary of {place.shown} yet"
        )
    elif at.is_loopback and not local:
        why = f"the store's address {at} is one of the service's host alone (--payload-address)"
    elif settings.tls_cert is not None and not tls and not local and not settings.direct_payloads:
        why = f"the store's address {at} has no TLS and the service has; --direct-payloads offers it all the same"
    else:
        addresses.append(pb.StoreAddress(host=at.host, port=at.port, tls=tls))
    if not addresses:
        return Offer((), why=why)
    try:
        return Offer(tuple(addresses), _authorities(settings) if tls else b"")
    except OSError as error:
        return Offer((), why=f"the certificates of the store cannot be read: {error}")


def _authorities(settings: RpcSettings) -> bytes:
    """Certificates by which clients know the store: its authority's, or the embedded store's own."""
    file = settings.tls_cert if settings.payload_listen else settings.store_ca
    return file.read_bytes() if file is not None else b""


def is_local(peer: str) -> bool:
    """True when the client is on this host, as far as its address shows."""
    kind, _, where = unquote(peer).partition(":")
    if kind == "unix":
        return True
    try:
        host = ipaddress.ip_address(where.rpartition(":")[0].strip("[]").partition("%")[0])
    except ValueError:
        return False
    return host.is_loopback or _is_own(host)


def _is_own(host: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    family = socket.AF_INET if host.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # The kernel binds to addresses of its own alone; nothing is sent.
            probe.bind((str(host), 0))
        except OSError:
            return False
    return True
