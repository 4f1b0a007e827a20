"""TLS from files: who is let in by certificate, and certificates that are replaced under traffic. Real handshakes."""

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import pytest

from buffer_service.rpc.credentials import server_credentials
from buffer_service.security.certificates import Certificates, RenewedContext, TlsFiles, TlsRefused
from buffer_wire.connection.access import Access
from buffer_wire.connection.channels import Connector
from buffer_wire.errors import InvalidField
from tests.security.certificates import Authority, Certificate

pytestmark = pytest.mark.filterwarnings("ignore:unclosed")


class Clock:
    """Moves when it is told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Pki:
    """Two authorities, and what they signed."""

    ours: Authority
    theirs: Authority
    server: Certificate
    renewed: Certificate
    expired: Certificate
    client: Certificate
    stranger: Certificate


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    folder = tmp_path_factory.mktemp("pki")
    ours, theirs = Authority(folder, "ours"), Authority(folder, "theirs")
    return Pki(
        ours,
        theirs,
        ours.issue("server"),
        theirs.issue("renewed"),
        ours.issue("expired", expired=True),
        ours.issue("client"),
        theirs.issue("stranger"),
    )


@pytest.fixture
def files(pki: Pki, tmp_path: Path) -> TlsFiles:
    made = TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key")
    install(pki.server, made)
    return made


def install(certificate: Certificate, files: TlsFiles) -> None:
    shutil.copy(certificate.cert, files.cert)
    shutil.copy(certificate.key, files.key)


@asynccontextmanager
async def serving(certificates: Certificates) -> AsyncIterator[str]:
    """A server that answers every call; yields its address."""

    async def answer(_request: bytes, _context: object) -> bytes:
        return b"ok"

    server = grpc.aio.server()
    handlers = {"Call": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    port = server.add_secure_port("127.0.0.1:0", server_credentials(certificates))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def gets_in(address: str, access: Access) -> bool:
    """True when a new connection answers."""
    channel = Connector(address, access).asyncio()
    try:
        return bool(await channel.unary_unary("/t.T/Call", None, None)(b"", timeout=10) == b"ok")
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return False
    finally:
        await channel.close(None)


async def test_a_client_believes_its_authority_alone(pki: Pki, files: TlsFiles) -> None:
    async with serving(Certificates(files)) as address:
        assert await gets_in(address, Access(tls_ca=pki.ours.cert))
        assert not await gets_in(address, Access(tls_ca=pki.theirs.cert))
        assert not await gets_in(address, Access())
        assert not await gets_in(address, Access(tls_ca="system"))


async def test_a_certificate_of_another_name_needs_that_name(pki: Pki, files: TlsFiles) -> None:
    install(pki.ours.issue("elsewhere", names="DNS:buffer.internal"), files)
    async with serving(Certificates(files)) as address:
        assert not await gets_in(address, Access(tls_ca=pki.ours.cert))
        assert await gets_in(address, Access(tls_ca=pki.ours.cert, tls_server_name="buffer.internal"))


async def test_an_expired_certificate_is_not_believed(pki: Pki, files: TlsFiles) -> None:
    install(pki.expired, files)
    async with serving(Certificates(files)) as address:
        assert not await gets_in(address, Access(tls_ca=pki.ours.cert))


async def test_mutual_tls_asks_every_client(pki: Pki, files: TlsFiles) -> None:
    mutual = TlsFiles(files.cert, files.key, pki.ours.cert)
    async with serving(Certificates(mutual)) as address:

        async def with_certificate(one: Certificate) -> bool:
            return await gets_in(address, Access(tls_ca=pki.ours.cert, tls_cert=one.cert, tls_key=one.key))

        assert await with_certificate(pki.client)
        assert not await with_certificate(pki.stranger)
        assert not await with_certificate(pki.expired)
        assert not await gets_in(address, Access(tls_ca=pki.ours.cert))


async def test_a_certificate_is_replaced_under_traffic_without_a_failed_call(pki: Pki, files: TlsFiles) -> None:
    clock = Clock()
    async with serving(Certificates(files, clock)) as address:
        old = Connector(address, Access(tls_ca=pki.ours.cert)).asyncio()
        call = old.unary_unary("/t.T/Call", None, None)
        stop, done = asyncio.Event(), asyncio.Queue[None]()

        async def traffic() -> None:
            while not stop.is_set():
                assert await call(b"", timeout=10) == b"ok"
                done.put_nowait(None)

        under_way = asyncio.create_task(traffic())
        # In two steps, as a tool writes them: in between they do not go together.
        shutil.copy(pki.renewed.cert, files.cert)
        clock.now += 1.0
        assert await gets_in(address, Access(tls_ca=pki.ours.cert)), "the old one is in force"
        shutil.copy(pki.renewed.key, files.key)
        clock.now += 1.0
        assert await gets_in(address, Access(tls_ca=pki.theirs.cert)), "the new one is in force"
        assert not await gets_in(address, Access(tls_ca=pki.ours.cert))
        for _ in range(done.qsize() + 10):
            await asyncio.wait_for(done.get(), 10)
        stop.set()
        await under_way
        await old.close(None)


async def test_the_clients_authority_is_replaced_too(pki: Pki, files: TlsFiles, tmp_path: Path) -> None:
    clock, ca = Clock(), tmp_path / "clients.crt"
    shutil.copy(pki.ours.cert, ca)
    async with serving(Certificates(TlsFiles(files.cert, files.key, ca), clock)) as address:
        access = Access(tls_ca=pki.ours.cert, tls_cert=pki.stranger.cert, tls_key=pki.stranger.key)
        assert not await gets_in(address, access)
        shutil.copy(pki.theirs.cert, ca)
        clock.now += 1.0
        assert await gets_in(address, access)


async def test_the_admin_pages_context_hands_new_connections_the_new_certificate(pki: Pki, files: TlsFiles) -> None:
    clock = Clock()
    context = RenewedContext.of(Certificates(files, clock))

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"ok")
        await writer.drain()
        writer.close()

    async def seen_by(authority: Authority) -> bytes:
        trusting = ssl.create_default_context(cafile=str(authority.cert))
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        try:
            return await asyncio.wait_for(reader.read(), 10)
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert await seen_by(pki.ours) == b"ok"
        install(pki.renewed, files)
        clock.now += 1.0
        assert await seen_by(pki.theirs) == b"ok"
        with pytest.raises(ssl.SSLCertVerificationError):
            await seen_by(pki.ours)


def test_broken_files_are_refused_at_the_start_and_passed_over_later(pki: Pki, files: TlsFiles) -> None:
    clock = Clock()
    certificates = Certificates(files, clock)
    good = certificates.material()
    files.key.write_text("no key")
    clock.now += 1.0
    assert certificates.material() is good
    states = [certificates.broken]
    with pytest.raises(TlsRefused, match=r"tls\.key"):
        Certificates(files)
    install(pki.renewed, files)
    clock.now += 1.0
    assert certificates.material().cert == pki.renewed.cert.read_bytes()
    assert [*states, certificates.broken] == [True, False]
    files.cert.unlink()
    with pytest.raises(TlsRefused, match=r"tls\.crt cannot be read"):
        Certificates(files)


def test_an_authority_file_without_certificates_is_refused(files: TlsFiles) -> None:
    with pytest.raises(TlsRefused, match="no certificates"):
        Certificates(TlsFiles(files.cert, files.key, files.key))


def test_an_authority_file_may_have_comments_in_any_language(pki: Pki, files: TlsFiles, tmp_path: Path) -> None:
    ca = tmp_path / "clients.crt"
    ca.write_text(f"# Société\n{pki.ours.cert.read_text()}", encoding="utf-8")
    context = Certificates(TlsFiles(files.cert, files.key, ca)).material().context
    assert context.cert_store_stats()["x509_ca"] == 1


def test_files_that_are_replaced_while_they_are_read_are_not_mixed(
    pki: Pki, files: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    certificates = Certificates(files, clock)
    good = certificates.material()
    read = Path.read_bytes

    def then_replaced(path: Path) -> bytes:
        content = read(path)
        if path == files.key:
            install(pki.server, files)
        return content

    install(pki.renewed, files)
    clock.now += 1.0
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", then_replaced)
        assert certificates.material() is good
        assert certificates.broken
    clock.now += 1.0
    assert certificates.material().cert == pki.server.cert.read_bytes()
    assert not certificates.broken


def test_a_client_names_the_file_that_it_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match=r"tls_ca is .*absent"):
        Connector("localhost:1", Access(tls_ca=tmp_path / "absent"))
