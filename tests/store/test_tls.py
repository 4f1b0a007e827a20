"""A store with TLS whose certificate is of a private authority: in front of a real one, something that speaks TLS."""

import asyncio
import contextlib
import dataclasses
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from buffer_service.store.address import Address
from buffer_service.store.primary import Primary
from buffer_service.store.redis_store import RedisRunStore
from buffer_wire.errors import StoreUnavailable
from tests.security.certificates import Authority
from tests.support.store_server import StoreServer


@asynccontextmanager
async def tls_in_front_of(server: StoreServer, authority: Authority) -> AsyncIterator[str]:
    """The address with TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issued = authority.issue("store")
    context.load_cert_chain(issued.cert, issued.key)

    connections: list[asyncio.StreamWriter] = []
    handlers: list[asyncio.Task[None]] = []

    async def passed_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                target.write(data)
                await target.drain()
        target.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        store_reader, store_writer = await asyncio.open_unix_connection(str(server.socket))
        connections.extend((writer, store_writer))
        handlers.append(asyncio.create_task(passed_on(reader, store_writer)))
        handlers.append(asyncio.create_task(passed_on(store_reader, writer)))

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with listening:
        yield f"rediss://localhost:{listening.sockets[0].getsockname()[1]}"
        async with asyncio.timeout(10):
            await asyncio.gather(*handlers)
            for connection in connections:
                with contextlib.suppress(OSError):
                    await connection.wait_closed()


async def test_a_store_of_a_private_authority_is_reached_with_its_file(tmp_path: Path) -> None:
    with StoreServer() as server:
        async with tls_in_front_of(server, authority := Authority(tmp_path)) as url:
            with pytest.raises(StoreUnavailable, match="certificate verify failed"):
                await RedisRunStore.connect(url)
            with pytest.raises(StoreUnavailable, match=r"certificate authorities in .*absent\.pem"):
                await RedisRunStore.connect(url, ca=tmp_path / "absent.pem")
            store = await RedisRunStore.connect(url, ca=authority.cert)
            assert list(await store.list_runs()) == []
            await store.close()


async def test_sentinels_are_asked_by_the_same_authority(tmp_path: Path) -> None:
    address = Address.parse("rediss+sentinel://localhost:1/buffer")
    primary = Primary(dataclasses.replace(address, ca=tmp_path / "ca.pem"))
    assert primary._sentinel is not None
    (client,) = primary._sentinel.sentinels
    assert client.connection_pool.connection_kwargs["ssl_ca_certs"] == str(tmp_path / "ca.pem")
