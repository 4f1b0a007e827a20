"""WeightFetcher: files of a version, from a path or over http, whole and checked or not at all, kept while in use."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from rollout_buffer.v1 import weights_pb2
from rollout_workers.errors import WeightsInvalid, WeightsUnavailable
from rollout_workers.versions import Version
from rollout_workers.weights.fetching.fetcher import WeightFetcher
from rollout_workers.weights.transfer.client import WeightClient
from tests.workers.building import weight_files
from tests.workers.fetched import CONTENT, V1, V2, V3, left_over, read, what_is_in


@pytest.fixture
async def fetcher(tmp_path: Path) -> AsyncIterator[WeightFetcher]:
    made = WeightFetcher(tmp_path / "weights", owner="w", keep=2, client=WeightClient(stall_s=0.5))
    yield made
    await made.close()


# ── from a path ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("form", ["absolute", "file url"])
async def test_files_come_from_a_path(fetcher: WeightFetcher, tmp_path: Path, form: str) -> None:
    manifest = weight_files(tmp_path / "with space", CONTENT)
    if form == "file url":
        manifest.base_url = (tmp_path / "with space").as_uri()
    place = await fetcher.fetch(V1, manifest, deadline_s=10)
    assert read(place) == CONTENT
    assert left_over(place.parent) == []


async def test_fetched_files_outlive_the_publishers(fetcher: WeightFetcher, tmp_path: Path) -> None:
    source = tmp_path / "source"
    place = await fetcher.fetch(V1, weight_files(source, CONTENT), deadline_s=10)
    for path in source.rglob("*"):
        if path.is_file():
            path.unlink()
    assert read(place) == CONTENT


async def test_files_are_copied_where_links_are_impossible(
    fetcher: WeightFetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_link)
    place = await fetcher.fetch(V1, weight_files(tmp_path / "source", CONTENT), deadline_s=10)
    assert read(place) == CONTENT
    assert (place / "config.json").stat().st_nlink == 1


@pytest.mark.parametrize("copied", [True, False])
async def test_wrong_checksum_names_the_file_and_replaces_nothing(
    fetcher: WeightFetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    if copied:
        monkeypatch.setattr(os, "link", lambda *_, **__: (_ for _ in ()).throw(OSError(18, "cross-device")))
    good = await fetcher.fetch(V1, weight_files(tmp_path / "one", CONTENT), deadline_s=10)
    manifest = weight_files(tmp_path / "two", CONTENT)
    damaged = bytearray(CONTENT["model.safetensors"])
    damaged[1000] ^= 1
    (tmp_path / "two" / "model.safetensors").write_bytes(damaged)
    with pytest.raises(WeightsInvalid, match=r"model.safetensors: its SHA-256 is") as caught:
        await fetcher.fetch(V2, manifest, deadline_s=10)
    assert caught.value.file == "model.safetensors"
    assert what_is_in(good.parent) == [good.name]
    assert read(good) == CONTENT
    assert (tmp_path / "two" / "model.safetensors").read_bytes() == bytes(damaged)


async def test_wrong_size_names_the_file(fetcher: WeightFetcher, tmp_path: Path) -> None:
    manifest = weight_files(tmp_path / "source", CONTENT)
    (tmp_path / "source" / "config.json").write_bytes(b'{"a": 12}')
    with pytest.raises(WeightsInvalid, match=r"config.json: it has 9 bytes, the manifest says 8"):
        await fetcher.fetch(V1, manifest, deadline_s=10)


async def test_missing_source_is_unavailable_and_can_come_later(fetcher: WeightFetcher, tmp_path: Path) -> None:
    manifest = weight_files(tmp_path / "source", CONTENT)
    (tmp_path / "source" / "config.json").rename(tmp_path / "aside")
    with pytest.raises(WeightsUnavailable, match="No such file"):
        await fetcher.fetch(V1, manifest, deadline_s=10)
    (tmp_path / "aside").rename(tmp_path / "source" / "config.json")
    assert read(await fetcher.fetch(V1, manifest, deadline_s=10)) == CONTENT


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../../b", "", ".", "a//b", "a\\b", "a\0b", "a\n", "x" * 257]
)
async def test_names_that_leave_the_directory_are_refused(fetcher: WeightFetcher, tmp_path: Path, name: str) -> None:
    manifest = weights_pb2.FilesManifest(base_url=str(tmp_path))
    manifest.files.add(name=name, size_bytes=1, sha256=bytes(32))
    with pytest.raises(WeightsInvalid, match="relative path"):
        await fetcher.fetch(V1, manifest, deadline_s=10)
    assert not (tmp_path / "weights").exists()


@pytest.mark.parametrize("base_url", ["relative/dir", "ftp://host/dir", "file://otherhost/dir"])
async def test_base_url_of_another_kind_is_refused(fetcher: WeightFetcher, tmp_path: Path, base_url: str) -> None:
    manifest = weight_files(tmp_path / "source", CONTENT)
    manifest.base_url = base_url
    with pytest.raises(WeightsInvalid, match="base_url must be"):
        await fetcher.fetch(V1, manifest, deadline_s=10)


# ── over http ────────────────────────────────────────────────────────────────

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Handler], Awaitable[str]]]:
    runners = []

    async def start(handler: Handler) -> str:
        app = web.Application()
        app.router.add_get("/v/{name:.*}", handler)
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port: int = runner.addresses[0][1]
        return f"http://127.0.0.1:{port}/v"

    yield start
    for runner in runners:
        await runner.cleanup()


def content_of(request: web.Request) -> tuple[bytes, int]:
    """The file asked for, and where the asked range begins."""
    asked = request.headers.get("Range", "bytes=0-")
    return CONTENT[request.match_info["name"]], int(asked.removeprefix("bytes=").rstrip("-"))


async def in_ranges(request: web.Request) -> web.StreamResponse:
    data, start = content_of(request)
    if not start:
        return web.Response(body=data)
    return web.Response(
        status=206, body=data[start:], headers={"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
    )


async def test_files_come_over_http(
    fetcher: WeightFetcher, tmp_path: Path, serve: Callable[[Handler], Awaitable[str]]
) -> None:
    manifest = weight_files(tmp_path / "source", CONTENT)
    manifest.base_url = await serve(in_ranges)
    assert read(await fetcher.fetch(V1, manifest, deadline_s=10)) == CONTENT


async def test_broken_connection_is_taken_up_where_it_broke(
    fetcher: WeightFetcher, tmp_path: Path, serve: Callable[[Handler], Awaitable[str]]
) -> None:
    starts: list[int] = []

    async def cut_twice(request: web.Request) -> web.StreamResponse:
        if request.match_info["name"] != "model.safetensors":
            return await in_ranges(request)
        data, start = content_of(request)
        starts.append(start)
        if len(starts) > 2:
            return await in_ranges(request)
        headers = {"Content-Length": str(len(data) - start)}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        response = web.StreamResponse(status=206 if start else 200, headers=headers)
        await response.prepare(request)
        await response.write(data[start : start + 300_000])
        assert request.transport is not None
        request.transport.abort()
        return response

    manifest = weight_files(tmp_path / "source", CONTENT)
    manifest.base_url = await serve(cut_twice)
    assert read(await fetcher.fetch(V1, manifest, deadline_s=20)) == CONTENT
    assert len(starts) == 3
    assert 0 == starts[0] < starts[1] < starts[2]


async def test_source_without_ranges_starts_over(
    fetcher: WeightFetcher, tmp_path: Path, serve: Callable[[Handler], Awaitable[str]]
) -> None:
    asked: list[int] = []

    async def whole(request: web.Request) -> web.StreamResponse:
        data, start = content_of(request)
        if request.match_info["name"] != "model.safetensors":
            return web.Response(body=data)
        asked.append(start)
        response = web.StreamResponse(headers={"Content-Length": str(len(data))})
        await response.prepare(request)
        await response.write(data if len(asked) > 1 else data[:300_000])
        if len(asked) == 1:
            assert request.transport is not None
            request.transport.abort()
        return response

    manifest = weight_files(tmp_path / "source", CONTENT)
    manifest.base_url = await serve(whole)
    assert read(await fetcher.fetch(V1, manifest, deadline_s=20)) == CONTENT
    assert len(asked) == 2
    assert asked[1] > 0


@pytest.mark.parametrize("status_of_rest", [206, 200])
async def test_body_that_ends_early_is_no_file(
    fetcher: WeightFetcher, tmp_path: Path, serve: Callable[[Handler], Awaitable[str]], status_of_rest: int
) -> None:
    async def short(request: web.Request) -> web.StreamResponse:
        data, start = content_of(request)
        return web.Response(body=data[:100] if not start else b"", status=status_of_rest if start else 200)

    manifest = weight_files(tmp_path / "source", {"model.safetensors": CONTENT["model.safetensors"]})
    manifest.base_url = await serve(short)
    with pytest.raises(WeightsUnavailable, match=r"the body ended early|a range came|not complete"):
        await fetcher.fetch(V1, manifest, deadline_s=1)
    assert left_over(tmp_path / "weights") == []


@pytest.mark.parametrize(
    ("change", "why"),
    [(lambda data: data + b"x", "more than the manifest's"), (lambda data: b"x" + data[1:], "SHA-256")],
)
async def test_wrong_content_over_http_names_the_file(
    fetcher: WeightFetcher,
    tmp_path: Path,
    serve: Callable[[Handler], Awaitable[str]],
    change: Callable[[bytes], bytes],
    why: str,
) -> None:
    async def wrong(request: web.Request) -> web.StreamResponse:
        return web.Response(body=change(content_of(request)[0]))

    manifest = weight_files(tmp_path / "source", {"model.safetensors": CONTENT["model.safetensors"]})
    manifest.base_url = await serve(wrong)
    with pytest.raises(WeightsInvalid, match=why) as caught:
        await fetcher.fetch(V1, manifest, deadline_s=10)
    assert caught.value.file == "model.safetensors"
    assert what_is_in(tmp_path / "weights") == []


async def test_source_that_is_gone_gives_up_at_the_deadline(fetcher: WeightFetcher, tmp_path: Path) -> None:
    manifest = weight_files(tmp_path / "source", CONTENT)
    manifest.base_url = "http://127.0.0.1:9/v"
    with pytest.raises(WeightsUnavailable, match=r"127\.0\.0\.1:9"):
        await fetcher.fetch(V1, manifest, deadline_s=0.5)


# ── the directory ────────────────────────────────────────────────────────────


async def test_same_version_is_fetched_once_for_all_engines(
    fetcher: WeightFetcher, tmp_path: Path, serve: Callable[[Handler], Awaitable[str]]
) -> None:
    asked: list[str] = []

    async def counting(request: web.Request) -> web.StreamResponse:
        asked.append(request.match_info["name"])
        return await in_ranges(request)

    manifest = weight_files(tmp_path / "source", CONTENT)
    manifest.base_url = await serve(counting)
    places = await asyncio.gather(*(fetcher.fetch(V1, manifest, deadline_s=10) for _ in range(3)))
    assert len(set(places)) == 1
    assert sorted(asked) == sorted(CONTENT)


async def test_same_version_of_other_content_is_another_place(fetcher: WeightFetcher, tmp_path: Path) -> None:
    one = await fetcher.fetch(V1, weight_files(tmp_path / "one", CONTENT), deadline_s=10)
    two = await fetcher.fetch(V1, weight_files(tmp_path / "two", {"config.json": b"{}"}), deadline_s=10)
    assert (read(one), read(two)) == (CONTENT, {"config.json": b"{}"})


async def test_newest_versions_and_those_in_use_are_kept(fetcher: WeightFetcher, tmp_path: Path) -> None:
    manifest = weight_files(tmp_path / "source", CONTENT)
    places = {v: await fetcher.fetch(v, manifest, deadline_s=10) for v in (V1, V2, V3, Version(2, 0))}
    fetcher.hold("slow", places[V1])
    fetcher.hold("quick", places[Version(2, 0)])
    assert {v for v, place in places.items() if place.exists()} == {V1, V3, Version(2, 0)}
    fetcher.hold("slow", places[V3])
    assert {v for v, place in places.items() if place.exists()} == {V3, Version(2, 0)}


async def test_nothing_is_kept_for_an_engine_that_has_left(fetcher: WeightFetcher, tmp_path: Path) -> None:
    manifest = weight_files(tmp_path / "source", CONTENT)
    places = [await fetcher.fetch(v, manifest, deadline_s=10, engine_id="gone") for v in (V1, V2)]
    fetcher.hold("gone", places[0])
    await fetcher.fetch(V2, manifest, deadline_s=10, engine_id="gone")
    for v in (V3, Version(2, 0)):
        fetcher.hold("stays", await fetcher.fetch(v, manifest, deadline_s=10))
    assert all(place.exists() for place in places)
    fetcher.release("gone")
    assert not any(place.exists() for place in places)
    fetcher.release("gone")


async def test_start_sweeps_what_this_worker_left_unfinished(fetcher: WeightFetcher, tmp_path: Path) -> None:
    root = tmp_path / "weights"
    for name in (".1.1-abc.part-w", ".0.9-abc-removed.part-w", ".1.1-abc.part-other", ".1.0-abc.part-dead", "1.0-abc"):
        (root / name).mkdir(parents=True)
    for name in (".1.0-abc.lock", ".1.1-abc.lock"):
        (root / name).touch()
    for name in (".1.0-abc.part-dead", ".1.0-abc.lock"):
        os.utime(root / name, (1, 1))
    fetcher.sweep()
    assert sorted(path.name for path in root.iterdir()) == [".1.1-abc.lock", ".1.1-abc.part-other", "1.0-abc"]
