"""Weights over https with a token, as a worker reads them and serves them to its peers."""

from pathlib import Path

import pytest

from buffer_wire.connection.access import Access
from buffer_wire.errors import InvalidField
from buffer_wire.weights.door import WeightsDoor
from rollout_workers.errors import WeightsUnavailable
from rollout_workers.options import WorkerOptions
from rollout_workers.versions import Version
from rollout_workers.weights.fetching.fetcher import WeightFetcher
from rollout_workers.weights.server import WeightServer, server_of
from rollout_workers.weights.transfer.client import WeightClient
from tests.security.certificates import Authority
from tests.workers.fetched import CONTENT, V1, read
from trainer_client.publish import FilesPublisher


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pki"), "weights")


def fetcher(root: Path, access: Access, peer: str = "") -> WeightFetcher:
    class Named:
        async def with_version(self, version: Version) -> list[str]:
            return [f"{peer}/{version.label}"] if peer else []

    return WeightFetcher(root, owner="w", keep=2, client=WeightClient(access, stall_s=1.0), peers=Named())


def write(into: Path) -> None:
    for name, content in CONTENT.items():
        (into / name).parent.mkdir(exist_ok=True)
        (into / name).write_bytes(content)


@pytest.mark.parametrize(
    ("token", "ca", "why"),
    [
        ("right", "", "CERTIFICATE_VERIFY_FAILED"),
        ("", "ours", "401.*a token is needed"),
        ("wrong", "ours", "401.*the token is refused"),
        ("right", "ours", ""),
    ],
)
async def test_a_worker_reads_with_the_token_and_the_authority(
    tmp_path: Path, authority: Authority, token: str, ca: str, why: str
) -> None:
    own = authority.issue("server")
    door = WeightsDoor(Access(token="right"), tls_cert=own.cert, tls_key=own.key)
    given = fetcher(tmp_path / "a", Access(token=token, tls_ca=authority.cert if ca else ""))
    with FilesPublisher(tmp_path / "w", serve="http", door=door) as publisher:
        manifest = publisher.write(write, term=1, version=1).listing()
        try:
            if why:
                with pytest.raises(WeightsUnavailable, match=why):
                    await given.fetch(V1, manifest, deadline_s=0.5)
            else:
                assert read(await given.fetch(V1, manifest, deadline_s=20)) == CONTENT
        finally:
            await given.close()


async def test_a_token_does_not_leave_the_machine_in_plain_text(tmp_path: Path) -> None:
    client = WeightClient(Access(token="secret"))
    assert client._may_carry("http://127.0.0.1:1/x")
    assert client._may_carry("http://[::1]:1/x")
    assert client._may_carry("https://far:1/x")
    assert not client._may_carry("http://far:1/x")
    assert WeightClient(Access(token="secret", insecure=True))._may_carry("http://far:1/x")


async def test_a_worker_asks_its_peers_for_the_token_too(tmp_path: Path, authority: Authority) -> None:
    own, access = authority.issue("peer"), Access(token="right", tls_ca=authority.cert)
    first = fetcher(tmp_path / "a", access)
    server = WeightServer(
        first.find, host="127.0.0.1", port=0, door=WeightsDoor(access, tls_cert=own.cert, tls_key=own.key)
    )
    await server.start()
    with FilesPublisher(tmp_path / "w", serve="http") as publisher:
        manifest = publisher.write(write, term=1, version=1).listing()
        await first.fetch(V1, manifest, deadline_s=20)
    second, third = fetcher(tmp_path / "b", access, server.url), fetcher(tmp_path / "c", Access(), server.url)
    try:
        assert server.url.startswith("https://")
        assert read(await second.fetch(V1, manifest, deadline_s=20)) == CONTENT
        with pytest.raises(WeightsUnavailable):
            await third.fetch(V1, manifest, deadline_s=0.5)
    finally:
        for each in (first, second, third, server):
            await each.close()


async def test_a_token_file_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="token_file"):
        WeightClient(Access(token_file=tmp_path / "missing"))


def test_a_worker_does_not_serve_behind_a_token_that_its_peers_would_not_send() -> None:
    given = {"address": "a:1", "run_id": "r", "reward": "m:f", "engine_urls": ("http://e:1",)}

    def made(serve: str, access: Access) -> WeightServer | None:
        options = WorkerOptions(**given, weights_serve=serve, weights_access=access)  # type: ignore[arg-type]
        return server_of(options, lambda *_: None)

    with pytest.raises(InvalidField, match="https alone"):
        made("0.0.0.0:1", Access(token="t"))
    assert made("0.0.0.0:1", Access()) is not None
    assert made("0.0.0.0:1", Access(token="t", insecure=True)) is not None
    assert made("127.0.0.1:1", Access(token="t")) is not None
