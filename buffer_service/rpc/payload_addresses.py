"""Addresses of the store that a client is told, by where the client is and what the settings allow.

Invariants: a client elsewhere is told no path and no loopback address. It is told no address without TLS where the
service itself has TLS, unless the settings allow that by name.
"""

import ipaddress
import socket
from dataclasses import dataclass, replace
from urllib.parse import unquote

from buffer_service.domain.ops import StorePlace
from buffer_service.observability.addresses import Address
from buffer_service.rpc_settings import RpcSettings
from rollout_buffer.v1 import payloads_pb2 as pb


@dataclass(frozen=True, slots=True)
class Offer:
    """Addresses for one client, the best one first, or the shards of a cluster; `why` says why there are none."""

    addresses: tuple[pb.StoreAddress, ...] = ()
    shards: tuple[pb.StoreShard, ...] = ()
    authorities_pem: bytes = b""
    why: str = ""


def offer(settings: RpcSettings, place: StorePlace, peer: str, *, knows_shards: bool) -> Offer:
    """Addresses, or shards, for a client whose connection gRPC calls `peer`."""
    if place.is_cluster:
        return _cluster(settings, place, peer) if knows_shards else Offer(why=_KNOWS_NO_SHARDS)
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
    else:
        why = _refused(settings, at, tls=tls, local=local)
        if not why:
            addresses.append(pb.StoreAddress(host=at.host, port=at.port, tls=tls))
    if not addresses:
        return Offer(why=why)
    return _with_authorities(settings, Offer(addresses=tuple(addresses)), tls=tls)


_KNOWS_NO_SHARDS = "the payloads lie on a cluster, which clients of this version know nothing of"


def _cluster(settings: RpcSettings, place: StorePlace, peer: str) -> Offer:
    if not place.shards:
        return Offer(why=f"nobody has named a primary of {place.shown} yet")
    local, shards = is_local(peer), []
    for shard in place.shards:
        if why := _refused(settings, Address(shard.host, shard.port), tls=place.tls, local=local):
            return Offer(why=why)
        slots = [pb.SlotRange(first=first, last=last) for first, last in shard.slots]
        address = pb.StoreAddress(host=shard.host, port=shard.port, tls=place.tls)
        shards.append(pb.StoreShard(address=address, slots=slots))
    return _with_authorities(settings, Offer(shards=tuple(shards)), tls=place.tls)


def _refused(settings: RpcSettings, at: Address, *, tls: bool, local: bool) -> str:
    """Reason why a client is not told an address; empty where it is."""
    if at.is_loopback and not local:
        return f"the store's address {at} is one of the service's host alone (--payload-address)"
    if settings.tls_cert is not None and not tls and not local and not settings.direct_payloads:
        return f"the store's address {at} has no TLS and the service has; --direct-payloads offers it all the same"
    return ""


def _with_authorities(settings: RpcSettings, offered: Offer, *, tls: bool) -> Offer:
    try:
        return replace(offered, authorities_pem=_authorities(settings) if tls else b"")
    except OSError as error:
        return Offer(why=f"the certificates of the store cannot be read: {error}")


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
