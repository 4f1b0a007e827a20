"""Pieces, rates and the limit on bandwidth: what a transfer decides by itself."""

import asyncio
import hashlib
import os
import random
import time
from pathlib import Path

import pytest
from aiohttp import web

from rollout_buffer.v1 import weights_pb2
from rollout_workers.weights.transfer import pieces as pieces_module
from rollout_workers.weights.transfer.client import WeightClient
from rollout_workers.weights.transfer.download import Download
from rollout_workers.weights.transfer.pieces import Pieces
from rollout_workers.weights.transfer.rates import Rates
from rollout_workers.weights.transfer.sources import Sources
from rollout_workers.weights.transfer.throttle import Throttle

FAST, SLOW, NEW = "http://fast:1", "http://slow:1", "http://new:1"
PIECE = 1000


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "PIECE_BYTES", PIECE)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 10_500])
@pytest.mark.parametrize("seed", range(5))
def test_pieces_that_come_in_any_order_make_the_file_and_its_checksum(tmp_path: Path, size: int, seed: int) -> None:
    order, content = random.Random(seed), os.urandom(size)
    pieces, came = Pieces(size), bytearray(size)
    descriptor = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    held: list[int] = []
    while not pieces.complete:
        while (piece := pieces.take()) is not None:
            held.append(piece)
        piece = order.choice(held)
        start, stop = pieces.span(piece)
        end = min(stop, start + order.randrange(1, PIECE))
        pieces.add(descriptor, piece, content[start:end])
        came[start:end] = content[start:end]
        front = pieces.ready(0)
        assert bytes(came[:front]) == content[:front]
        if not pieces.missing(piece):
            held.remove(piece)
            pieces.put_back(piece)
        if order.random() < 0.1 and held:
            pieces.put_back(held.pop())
    os.close(descriptor)
    assert (tmp_path / "f").read_bytes() == content
    assert pieces.sha256 == hashlib.sha256(content).digest()
    assert pieces.take() is None


@pytest.mark.usefixtures("small_pieces")
async def test_a_piece_that_somebody_waits_for_is_the_next() -> None:
    pieces = Pieces(10 * PIECE)
    waiting = asyncio.ensure_future(pieces.until(7_200))
    await asyncio.sleep(0)
    assert pieces.take() == 7
    assert pieces.take() == 0
    waiting.cancel()


def test_the_fastest_mirror_is_asked_and_a_new_one_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    rates = Rates()
    for url, seconds in ((SLOW, 10.0), (FAST, 1.0)):
        rates.began(url)
        rates.answered(url, 0.001)
        rates.ended(url, received=10_000_000, seconds=seconds, failed=False)
    assert rates.order([SLOW, FAST]) == ([FAST, SLOW], [])
    assert rates.order([SLOW, FAST, NEW]) == ([NEW, FAST, SLOW], [])
    rates.began(NEW)
    assert rates.order([SLOW, FAST, NEW]) == ([FAST, SLOW, NEW], [])
    rates.ended(NEW, received=0, seconds=1.0, failed=True)
    assert rates.order([SLOW, FAST, NEW]) == ([FAST, SLOW], [NEW])
    assert "http://new:1 failed" in rates.describe([SLOW, NEW])
    now = 61.0
    assert rates.order([SLOW, FAST, NEW]) == ([NEW, FAST, SLOW], [])
    now = 400.0
    assert sorted(rates.order([SLOW, FAST])[0]) == [FAST, SLOW]


def test_a_mirror_is_not_left_for_one_that_is_about_as_fast() -> None:
    rates = Rates()
    for url, seconds in ((SLOW, 1.2), (FAST, 1.0)):
        rates.began(url)
        rates.answered(url, 0.001)
        rates.ended(url, received=10_000_000, seconds=seconds, failed=False)
        rates.order([SLOW])
    assert rates.order([SLOW, FAST])[0] == [SLOW, FAST]


def test_a_far_server_is_worth_more_connections() -> None:
    rates = Rates()
    assert rates.streams(FAST) == 1
    for latency_s, streams in ((3.0, 16), (0.05, 10), (0.002, 1)):
        rates.began(FAST)
        rates.answered(FAST, latency_s)
        rates.ended(FAST, received=1, seconds=0.1, failed=False)
        assert rates.streams(FAST) == streams


async def test_downloads_together_keep_to_the_limit() -> None:
    throttle, began = Throttle(80.0), time.monotonic()

    async def download() -> None:
        for _ in range(10):
            await throttle.passed(250_000)

    await asyncio.gather(download(), download())
    taken = time.monotonic() - began
    assert 0.35 < taken < 1.5


async def _never() -> list[str]:
    return []


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("ranges", [True, False])
async def test_a_far_source_is_asked_over_several_connections(tmp_path: Path, ranges: bool) -> None:
    content = os.urandom(20 * PIECE + 17)
    at_once = most = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.05)
        at_once -= 1
        start, stop = 0, len(content)
        if ranges and "Range" in request.headers:
            start, stop, _ = request.http_range.indices(len(content))
        headers = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"} if ranges else {}
        return web.Response(status=206 if ranges else 200, headers=headers, body=content[start:stop])

    app = web.Application()
    app.router.add_get("/{name:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client, sha256 = WeightClient(), hashlib.sha256(content).digest()
    base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    client.rates.began(base)
    client.rates.answered(base, 0.05)
    client.rates.ended(base, received=0, seconds=0.1, failed=False)
    sources = Sources("f", sha256, base, _never, rates=client.rates)
    file = weights_pb2.WeightFile(name="f", size_bytes=len(content), sha256=sha256)
    try:
        await Download("1.1", sources, file, tmp_path / "f", client).run(time.monotonic() + 20)
    finally:
        await client.close()
        await runner.cleanup()
    assert (tmp_path / "f").read_bytes() == content
    if ranges:
        assert 3 <= most <= 10
