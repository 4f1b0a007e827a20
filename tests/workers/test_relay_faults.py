"""Relays that are killed, lose their upstream, or have a damaged file: what workers read is right all the same."""

import asyncio
import hashlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.mortal import mortal
from tests.workers.relaying import V1, manifest_of, relay, until, upstream, worker
from trainer_client.publish import FilesPublisher

CONTENT = os.urandom(9 << 20)
DIGEST = hashlib.sha256(CONTENT).hexdigest()
FILES = {DIGEST: CONTENT}
HALF = len(CONTENT) // 2


def halting() -> tuple[Callable[[int], Awaitable[None]], asyncio.Event]:
    """A gate of an upstream that stops in the middle, and the event with which it goes on."""
    goes_on = asyncio.Event()

    async def gate(at: int) -> None:
        if at >= HALF:
            await goes_on.wait()

    return gate, goes_on


async def test_a_relay_that_is_killed_in_a_fetch_is_left_for_the_publisher(tmp_path: Path) -> None:
    async with upstream(FILES) as far:
        far.gate, goes_on = halting()
        command = [sys.executable, "-m", "buffer_cli", "relay", "--upstream", far.url, "--listen", "127.0.0.1:0"]
        started = await asyncio.create_subprocess_exec(
            *mortal([*command, "--dir", str(tmp_path / "relay")]), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert started.stdout is not None
        url = None
        while url is None:
            url = re.search(rb"serving weights\s.*?url=(\S+)", await started.stdout.readline())

        def half_there() -> bool:
            return any(path.stat().st_size >= HALF - (1 << 20) for path in (tmp_path / "w").glob(".*part-w/f0"))

        with FilesPublisher(tmp_path / "p", serve="http") as publisher:
            written = publisher.write(lambda into: (into / "f0").write_bytes(CONTENT), term=1, version=1)
            async with worker(tmp_path / "w", url[1].decode()) as one:
                fetching = asyncio.ensure_future(one.fetch(V1, manifest_of(FILES, written.base_url), deadline_s=30))
                await until(half_there)
                started.send_signal(signal.SIGKILL)
                place = await fetching
        await started.wait()
        goes_on.set()
        assert (place / "f0").read_bytes() == CONTENT


async def test_workers_go_elsewhere_from_a_relay_without_upstream_which_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_workers.weights.transfer.rates.MAX_STREAMS", 1)
    async with upstream(FILES) as good, upstream(FILES) as far:
        far.gate, _ = halting()
        async with relay(tmp_path / "relay", far.url) as near, worker(tmp_path / "w", near.url, good.url) as one:
            fetching = asyncio.ensure_future(one.fetch(V1, manifest_of(FILES), deadline_s=30))
            await until(lambda: far.sent_bytes >= HALF)
            place = await fetching
            assert (place / "f0").read_bytes() == CONTENT
            assert good.sent_bytes > 0
            # The same again, now that the upstream gives the rest.
            far.gate = None
            async with worker(tmp_path / "w2", near.url) as two:
                assert ((await two.fetch(V1, manifest_of(FILES), deadline_s=30)) / "f0").read_bytes() == CONTENT
            assert far.sent_bytes < 1.5 * len(CONTENT)


async def test_a_file_that_is_damaged_at_the_relay_is_noticed_and_fetched_elsewhere_and_by_the_relay_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_workers.relay.disk._CHECK_S", 0.0)
    stored = tmp_path / "relay" / "files" / DIGEST
    async with upstream(FILES) as far, upstream(FILES) as good, relay(tmp_path / "relay", far.url) as near:
        async with worker(tmp_path / "w", near.url) as one:
            await one.fetch(V1, manifest_of(FILES), deadline_s=30)
        damaged = bytearray(CONTENT)
        damaged[HALF] ^= 1
        stored.write_bytes(damaged)
        async with worker(tmp_path / "w2", near.url, good.url) as two:
            place = await two.fetch(V1, manifest_of(FILES), deadline_s=30)
            assert (place / "f0").read_bytes() == CONTENT
            # The whole file came a second time, from there or to the relay.
            assert good.sent_bytes + far.sent_bytes >= 2 * len(CONTENT)
        async with worker(tmp_path / "w3", near.url) as three:
            place = await three.fetch(V1, manifest_of(FILES), deadline_s=30)
            assert (place / "f0").read_bytes() == CONTENT
        await until(lambda: stored.is_file() and stored.read_bytes() == CONTENT)


async def test_a_mixture_with_a_wrong_part_condemns_nobody_who_was_right(tmp_path: Path) -> None:
    wrong = bytearray(CONTENT)
    wrong[0] ^= 1
    async with (
        upstream({DIGEST: bytes(wrong)}) as bad,
        upstream(FILES) as good,
        worker(tmp_path / "w", bad.url, good.url) as one,
    ):

        async def breaks_once(at: int) -> None:
            if at >= HALF:
                bad.gate = None
                raise ConnectionResetError

        # The front is of the wrong one, the rest of the right one; both are all that there is.
        bad.gate = breaks_once
        place = await one.fetch(V1, manifest_of(FILES), deadline_s=30)
        assert (place / "f0").read_bytes() == CONTENT
        assert bad.gets
        assert good.sent_bytes > len(CONTENT)


async def test_a_wrong_file_of_an_upstream_is_not_kept_and_fetched_from_another(tmp_path: Path) -> None:
    wrong = bytearray(CONTENT)
    wrong[-1] ^= 1
    async with (
        upstream({DIGEST: bytes(wrong)}) as bad,
        upstream(FILES) as good,
        relay(tmp_path / "relay", bad.url, good.url) as near,
        worker(tmp_path / "w", near.url) as one,
    ):
        place = await one.fetch(V1, manifest_of(FILES, "http://127.0.0.1:9/gone"), deadline_s=30)
        assert (place / "f0").read_bytes() == CONTENT
        await until((tmp_path / "relay" / "files" / DIGEST).is_file)
        assert (tmp_path / "relay" / "files" / DIGEST).read_bytes() == CONTENT
