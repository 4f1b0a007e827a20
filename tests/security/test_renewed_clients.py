"""Clients whose certificate is replaced while they run: no call is lost, and what begins later shows the new one."""

import asyncio
import gc
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from buffer_service.rpc.credentials import server_credentials
from buffer_service.security.certificates import Certificates, TlsFiles
from buffer_wire.connection import tls_files
from buffer_wire.connection.access import Access
from buffer_wire.connection.channels import Connector
from buffer_wire.errors import InvalidField
from buffer_wire.weights.door import WeightsDoor
from tests.security.certificates import Authority, Certificate
from tests.support.service import running_service
from trainer_client.client.blocking import BufferClient
from trainer_client.client.driver import ClientOptions

pytestmark = pytest.mark.filterwarnings("ignore:unclosed")


class Server:
    """Answers with the name in the caller's certificate: once, or again and again until `release` is set."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.streams = 0

    async def who(self, _request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        (name,) = context.auth_context()["x509_common_name"]
        return bytes(name)

    async def stream(self, _request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> AsyncIterator[bytes]:
        self.streams += 1
        yield await self.who(b"", context)
        await asyncio.wait_for(self.release.wait(), 30)
        yield await self.who(b"", context)

    @asynccontextmanager
    async def serving(self, certificates: Certificates) -> AsyncIterator[str]:
        server = grpc.aio.server()
        handlers = {
            "Who": grpc.unary_unary_rpc_method_handler(self.who),
            "Stream": grpc.unary_stream_rpc_method_handler(self.stream),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
        port = server.add_secure_port("127.0.0.1:0", server_credentials(certificates))
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("renewed")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder, "ours")


@pytest.fixture(scope="module")
def issued(authority: Authority) -> dict[str, Certificate]:
    return {name: authority.issue(name) for name in ("server", "first", "second")}


@pytest.fixture
def access(authority: Authority, issued: dict[str, Certificate], tmp_path: Path) -> Access:
    made = Access(tls_ca=authority.cert, tls_cert=tmp_path / "tls.crt", tls_key=tmp_path / "tls.key")
    replace(made, issued["first"])
    return made


@pytest.fixture(autouse=True)
def looks_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_files, "POLL_S", 0.0)


def replace(access: Access, by: Certificate) -> None:
    """Replace it as a Secret's volume does: the new file takes the old one's name."""
    for source, target in ((by.cert, access.tls_cert), (by.key, access.tls_key)):
        new = Path(f"{target}.new")
        shutil.copy(source, new)
        new.replace(target)


def until_closed(channel: grpc.Channel, who: Callable[..., bytes]) -> None:
    """Call until the replaced connections are closed: gRPC's thread is told of a call's end beside the caller's."""
    deadline = time.monotonic() + 30
    while channel._replaced:  # type: ignore[attr-defined]  # closed connections show nowhere else
        assert time.monotonic() < deadline, "the old connection is not closed"
        assert who(b"", timeout=10) == b"second"


def mutual(authority: Authority, issued: dict[str, Certificate]) -> Certificates:
    return Certificates(TlsFiles(issued["server"].cert, issued["server"].key, authority.cert))


async def test_an_asyncio_client_shows_its_new_certificate_and_loses_no_call(
    authority: Authority, issued: dict[str, Certificate], access: Access
) -> None:
    server = Server()
    async with server.serving(mutual(authority, issued)) as address:
        channel = Connector(address, access).asyncio()
        who = channel.unary_unary("/t.T/Who", None, None)
        stream = channel.unary_stream("/t.T/Stream", None, None)
        old = stream(b"", timeout=30)
        assert await anext(aiter(old)) == b"first"
        seen = [await who(b"", timeout=10)]
        # Many at once, some of which are under way when the certificate changes.
        under_way = [asyncio.ensure_future(who(b"", timeout=10)) for _ in range(20)]
        replace(access, issued["second"])
        seen.append(await who(b"", timeout=10))
        assert {b"first"} == set(await asyncio.gather(*under_way))
        assert seen == [b"first", b"second"]
        # The stream goes on over the connection that it began on, which is closed after it.
        server.release.set()
        assert [answer async for answer in old] == [b"first"]
        assert await old.code() is grpc.StatusCode.OK
        assert await who(b"", timeout=10) == b"second"
        assert not channel._replaced  # type: ignore[attr-defined]  # closed connections show nowhere else
        await channel.close(None)
        with pytest.raises(Exception, match="closed"):
            await who(b"", timeout=10)


@pytest.mark.parametrize("options", [(), (("SingleThreadedUnaryStream", 1),)], ids=["grpcs_threads", "callers_thread"])
async def test_a_blocking_client_shows_its_new_certificate_and_loses_no_call(
    authority: Authority, issued: dict[str, Certificate], access: Access, options: tuple[tuple[str, int], ...]
) -> None:
    server = Server()

    def calls(address: str) -> list[bytes]:
        with Connector(address, access).blocking(*options) as channel:
            who = channel.unary_unary("/t.T/Who", None, None)
            old = channel.unary_stream("/t.T/Stream", None, None)(b"", timeout=30)
            seen = [next(iter(old)), who(b"", timeout=10)]
            replace(access, issued["second"])
            seen.append(who(b"", timeout=10))
            loop.call_soon_threadsafe(server.release.set)
            seen += list(old)
            seen.append(who(b"", timeout=10))
            until_closed(channel, who)
            return seen

    loop = asyncio.get_running_loop()
    async with server.serving(mutual(authority, issued)) as address:
        seen = await asyncio.to_thread(calls, address)
    assert seen == [b"first", b"first", b"second", b"first", b"second"]


@pytest.mark.parametrize("options", [(), (("SingleThreadedUnaryStream", 1),)], ids=["grpcs_threads", "callers_thread"])
async def test_a_stream_that_is_given_up_does_not_keep_the_old_connection(
    authority: Authority, issued: dict[str, Certificate], access: Access, options: tuple[tuple[str, int], ...]
) -> None:
    server = Server()

    def calls(address: str) -> None:
        with Connector(address, access).blocking(*options) as channel:
            who = channel.unary_unary("/t.T/Who", None, None)
            old = channel.unary_stream("/t.T/Stream", None, None)(b"", timeout=30)
            assert next(iter(old)) == b"first"
            replace(access, issued["second"])
            assert who(b"", timeout=10) == b"second"
            assert channel._replaced, "the stream is under way"  # type: ignore[attr-defined]
            old.cancel()  # type: ignore[no-untyped-call]
            del old
            until_closed(channel, who)

    async with server.serving(mutual(authority, issued)) as address:
        await asyncio.to_thread(calls, address)
        server.release.set()


def test_nothing_is_kept_of_calls_that_have_ended(access: Access) -> None:
    with Connector("localhost:1", access).blocking() as channel:

        def call() -> None:
            # As the trainer's client does: each call asks the channel for its way.
            with pytest.raises(grpc.RpcError):
                channel.unary_unary("/t.T/Who", None, None)(b"", timeout=0.001)

        def kept() -> int:
            gc.collect()
            return sum(issubclass(type(one), grpc.UnaryUnaryMultiCallable) for one in gc.get_objects())

        call()
        before = kept()
        for _ in range(20):
            call()
        assert kept() == before


async def test_files_that_do_not_go_together_are_passed_over(
    authority: Authority, issued: dict[str, Certificate], access: Access
) -> None:
    async with Server().serving(mutual(authority, issued)) as address:
        channel = Connector(address, access).asyncio()
        who = channel.unary_unary("/t.T/Who", None, None)
        shutil.copy(issued["second"].cert, access.tls_cert)
        assert await who(b"", timeout=10) == b"first"
        await asyncio.to_thread(Path(access.tls_key).unlink)
        assert await who(b"", timeout=10) == b"first"
        shutil.copy(issued["second"].key, access.tls_key)
        assert await who(b"", timeout=10) == b"second"
        await channel.close(None)


@pytest.mark.parametrize(
    "begin",
    [
        lambda access: Connector("localhost:1", access),
        lambda access: Certificates(TlsFiles(access.tls_cert, access.tls_key)),
        lambda access: WeightsDoor(tls_cert=access.tls_cert, tls_key=access.tls_key),
    ],
    ids=["a client", "a service", "a server of weights"],
)
def test_who_begins_while_files_are_replaced_waits_for_the_last_of_them(
    begin: Callable[[Access], object], issued: dict[str, Certificate], access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(issued["second"].cert, access.tls_cert)
    monkeypatch.setattr(time, "sleep", lambda _: shutil.copy(issued["second"].key, access.tls_key))
    begin(access)


def test_a_client_does_not_start_with_files_that_do_not_go_together(
    issued: dict[str, Certificate], access: Access
) -> None:
    shutil.copy(issued["second"].cert, access.tls_cert)
    with pytest.raises(InvalidField, match=r"tls_key is .*the key of .*tls\.crt"):
        Connector("localhost:1", access)


def test_a_trainer_outlives_its_certificate_and_the_authority_that_signed_it(
    authority: Authority, issued: dict[str, Certificate], access: Access, folder: Path, tmp_path: Path
) -> None:
    theirs = Authority(folder, "theirs")
    clients = tmp_path / "clients.crt"
    shutil.copy(authority.cert, clients)
    server = issued["server"]
    options = ClientOptions(tls_ca=access.tls_ca, tls_cert=access.tls_cert, tls_key=access.tls_key, timeout_s=60)
    with (
        running_service(tmp_path, tls_cert=server.cert, tls_key=server.key, tls_client_ca=clients) as service,
        BufferClient(service.address, options) as client,
    ):
        client.create_run("math")
        replace(access, theirs.issue("third"))
        shutil.copy(theirs.cert, clients)
        # Connections end with the service, and the next ones need the new certificate.
        service.kill()
        service.start()
        assert client.run("math").run_id == "math"
