"""Tests of the addresses of the store that a client is told, by where it is and what the settings allow."""

import socket
from pathlib import Path
from typing import Any

import pytest

from buffer_service.domain.ops import StorePlace, StoreShard
from buffer_service.rpc.payload_addresses import is_local, offer
from buffer_service.settings import Settings

HERE, ELSEWHERE = "ipv4:127.0.0.1:40000", "ipv4:192.0.2.7:40000"
EMBEDDED = StorePlace("embedded", "/data/store.sock", "", 0, tls=False, database=0)


def external(host: str, *, tls: bool = False) -> StorePlace:
    return StorePlace("external", "", host, 6379, tls=tls, database=0)


def told(place: StorePlace, peer: str, **settings: Any) -> list[str]:
    """Addresses in short: a path, or host:port with its scheme; or the reason why there are none."""
    offered = offer(Settings(**settings).for_rpc(), place, peer, knows_shards=False)
    shown = [at.unix_path or f"{'rediss' if at.tls else 'redis'}://{at.host}:{at.port}" for at in offered.addresses]
    assert bool(shown) != bool(offered.why)
    return shown or [offered.why]


@pytest.mark.parametrize("peer", [HERE, "ipv4:127.8.0.1:1", "ipv6:[::1]:1", "ipv6:%5B::1%5D:1", "unix:", "unix:/a/b"])
def test_clients_on_this_host_are_local(peer: str) -> None:
    assert is_local(peer)


@pytest.mark.parametrize("peer", [ELSEWHERE, "ipv6:[2001:db8::1]:1", "ipv6:%5B2001:db8::1%5D:1", "vsock:3", "", "x"])
def test_others_are_not(peer: str) -> None:
    assert not is_local(peer)


def test_a_client_that_comes_by_an_address_of_this_host_is_local() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        own = probe.getsockname()[0]
    assert is_local(f"ipv4:{own}:40000")


def test_the_embedded_stores_socket_is_for_clients_of_its_host() -> None:
    assert told(EMBEDDED, HERE) == ["/data/store.sock"]
    assert "--payload-listen" in told(EMBEDDED, ELSEWHERE)[0]


def test_an_embedded_store_that_listens_is_for_all() -> None:
    listens: dict[str, Any] = {"payload_listen": "10.0.0.1:7000", "insecure": True}
    assert told(EMBEDDED, ELSEWHERE, **listens) == ["redis://10.0.0.1:7000"]
    assert told(EMBEDDED, HERE, **listens) == ["/data/store.sock", "redis://10.0.0.1:7000"], "the best one first"
    listens |= {"payload_listen": "0.0.0.0:7000", "payload_address": "buffer.example:7443"}
    assert told(EMBEDDED, ELSEWHERE, **listens) == ["redis://buffer.example:7443"]


def test_an_embedded_store_has_the_services_certificate(tmp_path: Path) -> None:
    (tmp_path / "chain").write_bytes(b"PEM")
    settings = Settings(
        payload_listen="10.0.0.1:7000",
        tokens_file=tmp_path / "tokens",
        tls_cert=tmp_path / "chain",
        tls_key=tmp_path / "key",
    ).for_rpc()
    offered = offer(settings, EMBEDDED, ELSEWHERE, knows_shards=False)
    assert (offered.addresses[0].tls, offered.authorities_pem) == (True, b"PEM")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_loopback_address_is_for_clients_of_its_host(host: str) -> None:
    at = f"[{host}]" if ":" in host else host
    assert told(external(host), HERE, store=f"redis://{at}") == [f"redis://{host}:6379"]
    assert "--payload-address" in told(external(host), ELSEWHERE, store=f"redis://{at}")[0]
    assert told(external(host), ELSEWHERE, store=f"redis://{at}", payload_address="s:1") == ["redis://s:1"]


def test_a_stores_plain_address_is_as_safe_as_the_services_or_named_by_the_operator() -> None:
    doors: dict[str, Any] = {"store": "redis://s", "tls_cert": "c", "tls_key": "k"}
    assert told(external("s"), ELSEWHERE, store="redis://s") == ["redis://s:6379"]
    assert "no TLS" in told(external("s"), ELSEWHERE, **doors)[0]
    assert told(external("s"), HERE, **doors) == ["redis://s:6379"]
    assert told(external("s"), ELSEWHERE, **doors, direct_payloads=True) == ["redis://s:6379"]
    assert told(external("s", tls=True), ELSEWHERE, **doors) == ["rediss://s:6379"]


def test_a_store_on_this_host_with_an_address_of_its_own_has_not_the_services_certificate() -> None:
    doors: dict[str, Any] = {"store": "unix:///s", "payload_address": "s:1", "tls_cert": "c", "tls_key": "k"}
    beside = StorePlace("external", "/s", "", 0, tls=False, database=0)
    assert "no TLS" in told(beside, ELSEWHERE, **doors)[0]
    assert told(beside, ELSEWHERE, **doors, direct_payloads=True) == ["redis://s:1"]


def test_before_the_sentinels_have_named_a_primary_nobody_is_told_one() -> None:
    assert "--payload-listen" not in told(external(""), HERE, store="redis://s")[0]


def cluster(*hosts: str, tls: bool = False) -> StorePlace:
    shards = [StoreShard(host, 6379, [(number, number)]) for number, host in enumerate(hosts)]
    return StorePlace("cluster", "", "", 0, tls=tls, database=0, is_cluster=True, shards=shards)


def shards_told(place: StorePlace, peer: str, **settings: Any) -> list[str]:
    offered = offer(Settings(**settings).for_rpc(), place, peer, knows_shards=True)
    assert not offered.addresses
    assert bool(offered.shards) != bool(offered.why)
    told = [(shard.address, shard.slots[0]) for shard in offered.shards]
    return [f"{at.host}:{at.port} {at.tls} {slots.first}-{slots.last}" for at, slots in told] or [offered.why]


def test_a_client_that_knows_shards_is_told_every_primary_of_a_cluster_and_its_slots() -> None:
    there = cluster("10.0.0.1", "10.0.0.2", tls=True)
    assert shards_told(there, ELSEWHERE) == ["10.0.0.1:6379 True 0-0", "10.0.0.2:6379 True 1-1"]
    assert shards_told(cluster("127.0.0.1"), HERE) == ["127.0.0.1:6379 False 0-0"]
    assert "clients of this version" in offer(Settings().for_rpc(), there, ELSEWHERE, knows_shards=False).why


def test_a_cluster_of_which_one_shard_is_out_of_bounds_is_not_told_at_all(tmp_path: Path) -> None:
    assert "service's host alone" in shards_told(cluster("10.0.0.1", "127.0.0.1"), ELSEWHERE)[0]
    assert "nobody has named" in shards_told(cluster(), HERE)[0]
    files = {name: tmp_path / name for name in ("tls_cert", "tls_key", "tokens_file")}
    assert "no TLS" in shards_told(cluster("10.0.0.1"), ELSEWHERE, **files)[0]
    assert shards_told(cluster("10.0.0.1"), ELSEWHERE, **files, direct_payloads=True) == ["10.0.0.1:6379 False 0-0"]
