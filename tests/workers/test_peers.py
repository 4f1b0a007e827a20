"""Weights from other workers: what is served, who is asked, and what a peer cannot do."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from rollout_buffer.v1 import common_pb2, weights_pb2
from rollout_workers.errors import WeightsInvalid, WeightsUnavailable
from rollout_workers.service.client import ServiceClient
from rollout_workers.versions import Version
from rollout_workers.weights.fetching.fetcher import WeightFetcher
from rollout_workers.weights.fetching.peers import ReportedPeers
from rollout_workers.weights.server import WeightServer
from rollout_workers.weights.transfer.client import WeightClient
from tests.workers.building import weight_files
from tests.workers.fake_service import FakeService
from tests.workers.working import working
from trainer_client.publish.files import FilesPublisher

CONTENT = {"config.json": b'{"a": 1}', "model.safetensors": bytes(range(256)) * 4096, "sub/tokenizer.json": b"{}"}
V1 = Version(1, 1)


class Named:
    """Peers that a test names."""

    def __init__(self, *urls: str) -> None:
        self.urls = urls
        self.asked = 0

    async def with_version(self, version: Version) -> Sequence[str]:
        self.asked += 1
        return [f"{url}/{version.label}" for url in self.urls]


@asynccontextmanager
async def fetcher(root: Path, *urls: str, prefer_peers: bool = False) -> AsyncIterator[WeightFetcher]:
    made = WeightFetcher(
        root, owner="w", keep=2, client=WeightClient(stall_s=0.5), peers=Named(*urls), prefer_peers=prefer_peers
    )
    yield made
    await made.close()


@asynccontextmanager
async def serving(of: WeightFetcher) -> AsyncIterator[str]:
    server = WeightServer(of.find, host="127.0.0.1", port=0)
    await server.start()
    yield server.url
    await server.close()


@asynccontextmanager
async def answering(handler: object) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/{path:.*}", handler)  # type: ignore[arg-type]
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def read(place: Path) -> dict[str, bytes]:
    return {str(p.relative_to(place)): p.read_bytes() for p in sorted(place.rglob("*")) if p.is_file()}


def gone(manifest: weights_pb2.FilesManifest, base_url: str = "http://127.0.0.1:9/v") -> weights_pb2.FilesManifest:
    """Make the same files from a publisher that is not there."""
    changed = weights_pb2.FilesManifest()
    changed.CopyFrom(manifest)
    changed.base_url = base_url
    return changed


# ── who is asked ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize("base_url", ["http://127.0.0.1:9/v", "/nowhere/v1"])
async def test_peer_gives_what_a_publisher_that_is_gone_does_not(tmp_path: Path, base_url: str) -> None:
    manifest = weight_files(tmp_path / "source", CONTENT)
    async with fetcher(tmp_path / "a") as first, serving(first) as url, fetcher(tmp_path / "b", url) as second:
        await first.fetch(V1, manifest, deadline_s=10)
        assert read(await second.fetch(V1, gone(manifest, base_url), deadline_s=10)) == CONTENT


async def test_publisher_that_answers_is_asked_alone(tmp_path: Path) -> None:
    manifest = weight_files(tmp_path / "source", CONTENT)
    async with fetcher(tmp_path / "a") as first, serving(first) as url:
        await first.fetch(V1, manifest, deadline_s=10)
        async with fetcher(tmp_path / "b", "http://127.0.0.1:9") as second:
            await second.fetch(V1, gone(manifest, f"{url}/1.1"), deadline_s=10)
            assert second._peers.asked == 0  # type: ignore[attr-defined]


async def test_peers_go_first_where_that_is_preferred(tmp_path: Path) -> None:
    manifest = weight_files(tmp_path / "source", CONTENT)

    async def never(request: web.Request) -> web.StreamResponse:
        raise AssertionError("the publisher was asked")

    async with (
        fetcher(tmp_path / "a") as first,
        serving(first) as url,
        answering(never) as publisher,
        fetcher(tmp_path / "b", url, prefer_peers=True) as second,
    ):
        await first.fetch(V1, manifest, deadline_s=10)
        assert read(await second.fetch(V1, gone(manifest, publisher), deadline_s=10)) == CONTENT


async def test_transfer_that_breaks_goes_on_at_a_peer_where_it_broke(tmp_path: Path) -> None:
    manifest = weight_files(tmp_path / "source", {"m": CONTENT["model.safetensors"]})
    starts: list[str] = []

    async def cuts(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(CONTENT["model.safetensors"]))})
        await response.prepare(request)
        await response.write(CONTENT["model.safetensors"][:300_000])
        assert request.transport is not None
        request.transport.abort()
        return response

    async with fetcher(tmp_path / "a") as first, answering(cuts) as publisher:
        place = await first.fetch(V1, manifest, deadline_s=10)

        async def goes_on(request: web.Request) -> web.StreamResponse:
            starts.append(request.headers["Range"])
            return web.FileResponse(place / "m")

        async with answering(goes_on) as peer, fetcher(tmp_path / "b", peer) as second:
            taken = await second.fetch(V1, gone(manifest, publisher), deadline_s=10)
            assert read(taken) == {"m": CONTENT["model.safetensors"]}
    assert len(starts) == 1
    assert 0 < int(starts[0].removeprefix("bytes=").rstrip("-")) <= 300_000


async def test_wrong_file_of_a_peer_is_fetched_elsewhere(tmp_path: Path) -> None:
    manifest = weight_files(tmp_path / "source", {"m": b"right"})
    asked: list[str] = []

    async def wrong(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        return web.Response(body=b"wrong")

    async with (
        fetcher(tmp_path / "a") as first,
        serving(first) as good,
        answering(wrong) as bad,
        fetcher(tmp_path / "b", bad, good, prefer_peers=True) as second,
    ):
        await first.fetch(V1, manifest, deadline_s=10)
        assert read(await second.fetch(V1, gone(manifest), deadline_s=10)) == {"m": b"right"}
    assert asked == ["/1.1/m"]


async def test_wrong_file_of_the_publisher_is_its_fault(tmp_path: Path) -> None:
    manifest = weight_files(tmp_path / "source", {"m": b"right"})

    async def wrong(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"wrong")

    async with answering(wrong) as publisher, fetcher(tmp_path / "b", "http://127.0.0.1:9") as second:
        with pytest.raises(WeightsInvalid, match="SHA-256"):
            await second.fetch(V1, gone(manifest, publisher), deadline_s=10)


async def test_without_anybody_who_has_it_the_error_names_the_publisher(tmp_path: Path) -> None:
    manifest = weight_files(tmp_path / "source", {"m": b"right"})
    async with fetcher(tmp_path / "a") as first, serving(first) as empty, fetcher(tmp_path / "b", empty) as second:
        with pytest.raises(WeightsUnavailable, match=r"127\.0\.0\.1:9/v/m"):
            await second.fetch(V1, gone(manifest), deadline_s=1)
        assert list((tmp_path / "b").iterdir()) == []


async def test_engines_that_report_the_version_and_an_address_are_the_peers(fake: FakeService) -> None:
    def report(engine_id: str, version: int, url: str, silent_ms: int = 0) -> None:
        fake.engines[engine_id] = weights_pb2.EngineReport(
            engine_id=engine_id,
            loaded=common_pb2.WeightVersion(term=1, version=version),
            weights_url=url,
            silent_ms=silent_ms,
        )

    report("a.e0", 1, "http://a:1")
    report("a.e1", 1, "http://a:1/")
    report("b.e0", 1, "http://b:1")
    report("old.e0", 0, "http://old:1")
    report("mute.e0", 1, "")
    report("dead.e0", 1, "http://dead:1", silent_ms=60_000)
    report("odd.e0", 1, "file:///etc")
    report("self.e0", 1, "http://self:1")
    service = ServiceClient(fake.address, "r", instance_id="i", timeout_s=20)
    peers = ReportedPeers(service)
    peers.own_url = "http://self:1"
    assert sorted(await peers.with_version(V1)) == ["http://a:1/1.1", "http://b:1/1.1"]
    await service.close()


async def test_service_that_does_not_answer_means_no_peers(fake: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_workers.weights.fetching.peers._ANSWER_S", 0.2)
    await fake.stop()
    service = ServiceClient(fake.address, "r", instance_id="i", timeout_s=20)
    assert await ReportedPeers(service).with_version(V1) == []
    await service.close()


# ── what is served ───────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "path",
    [
        "/1.2/m",
        "/1.1/other",
        "/1.1/../1.1/m2",
        "/1.1/%2e%2e/secret",
        "/1.1/..%2fsecret",
        "/1.1//etc/passwd",
        "/1.1",
        "/",
        "/../../etc/passwd",
    ],
)
async def test_only_files_of_verified_versions_can_be_read(tmp_path: Path, path: str) -> None:
    manifest = weight_files(tmp_path / "source", {"m": b"content"})
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "secret").write_bytes(b"secret")
    async with fetcher(tmp_path / "a") as of, serving(of) as url:
        place = await of.fetch(V1, manifest, deadline_s=10)
        (place / "other").write_bytes(b"not in the manifest")
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        # As it is, without a client that tidies the path up.
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        status = (await reader.readline()).split()[1]
        writer.close()
        assert status == b"404"


async def test_nothing_is_written_and_nothing_unfinished_is_served(tmp_path: Path) -> None:
    manifest = weight_files(tmp_path / "source", {"m": b"content"})
    async with fetcher(tmp_path / "a") as of, serving(of) as url, aiohttp.ClientSession() as session:
        async with session.get(f"{url}/1.1/m") as response:
            assert response.status == 404
        place = await of.fetch(V1, manifest, deadline_s=10)
        for method in ("PUT", "POST", "DELETE"):
            async with session.request(method, f"{url}/1.1/m", data=b"x") as response:
                assert response.status == 405
        async with session.get(f"{url}/1.1/m", headers={"Range": "bytes=3-"}) as response:
            assert (response.status, await response.read()) == (206, b"tent")
            assert response.headers["Content-Range"] == "bytes 3-6/7"
        assert read(place) == {"m": b"content"}


async def test_version_that_was_removed_is_not_served_any_more(tmp_path: Path) -> None:
    manifest = weight_files(tmp_path / "source", {"m": b"content"})
    async with fetcher(tmp_path / "a") as of:
        for version in range(1, 5):
            of.hold("e", await of.fetch(Version(1, version), manifest, deadline_s=10))
        assert [of.find(f"1.{version}", "m") is not None for version in range(1, 5)] == [False, False, True, True]


# ── both ends ────────────────────────────────────────────────────────────────


async def test_trainer_and_workers_share_no_directory(tmp_path: Path) -> None:
    """One worker fetches from the trainer, the trainer goes away, and the next worker fetches from the first."""
    (tmp_path / "model").mkdir()
    for name, data in CONTENT.items():
        (tmp_path / "model" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_bytes(data)
    publisher = FilesPublisher(tmp_path / "trainer", serve="http")
    published = publisher.write(tmp_path / "model", term=1, version=1)
    manifest = weights_pb2.FilesManifest(base_url=published.base_url)
    for file in published.files:
        manifest.files.add(name=file.name, size_bytes=file.size_bytes, sha256=file.sha256)
    assert manifest.base_url.startswith("http://127.0.0.1:")
    async with fetcher(tmp_path / "a") as first, serving(first) as url, fetcher(tmp_path / "b", url) as second:
        assert read(await first.fetch(V1, manifest, deadline_s=10)) == CONTENT
        await asyncio.to_thread(publisher.close)
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(manifest.base_url.split(":")[2].split("/")[0]))) != 0
        (tmp_path / "trainer").rename(tmp_path / "elsewhere")
        assert read(await second.fetch(V1, manifest, deadline_s=10)) == CONTENT


async def test_worker_serves_what_it_loaded_to_a_worker_that_starts_later(fake: FakeService, tmp_path: Path) -> None:
    manifest = weight_files(tmp_path / "source", CONTENT)
    await fake.publish(1, 1, weights_pb2.WeightManifest(files=manifest))
    async with working(fake, tmp_path / "one", worker_id="a", weights_serve="127.0.0.1:0"):
        await fake.until(lambda: fake.engine("a.e0").loaded.version == 1)
        assert fake.engine("a.e0").weights_url.startswith("http://127.0.0.1:")
        (tmp_path / "source").rename(tmp_path / "gone")
        async with working(fake, tmp_path / "two", worker_id="b"):
            await fake.until(lambda: fake.engine("b.e0").loaded.version == 1)
            assert fake.engine("b.e0").weights_url == ""
            assert fake.engine("b.e0").errors == 0
    (place,) = (tmp_path / "two" / "weights" / "r").glob("[0-9]*")
    assert read(place) == CONTENT
    assert {path.stat().st_nlink for path in place.rglob("*") if path.is_file()} == {1}
