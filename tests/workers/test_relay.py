"""A relay of weights: each file comes once, is read while it comes, and stays within a bound."""

import asyncio
import hashlib
import os
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest

from buffer_wire.connection.access import Access
from buffer_wire.weights.door import WeightsDoor
from rollout_workers.errors import WeightsUnavailable
from tests.security.certificates import Authority
from tests.workers.relaying import V1, manifest_of, relay, until, upstream, worker
from trainer_client.publish import FilesPublisher


def named(*contents: bytes) -> dict[str, bytes]:
    return {hashlib.sha256(content).hexdigest(): content for content in contents}


LARGE = named(os.urandom(9 << 20))
"""Larger than two pieces."""
BOTH = {**named(b"{}"), **LARGE}


ONCE = 2 * sum(map(len, BOTH.values()))
"""Bound on what an upstream sends of both, once: a connection that is cut for others was sent more than it took."""


async def get(url: str, **headers: str) -> tuple[int, bytes, str]:
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
        return response.status, await response.read(), response.headers.get("Content-Range", "")


async def test_many_workers_at_the_same_time_cost_the_upstream_each_file_once(tmp_path: Path) -> None:
    async with upstream(BOTH) as far, relay(tmp_path / "relay", far.url) as near:

        async def fetch(at: int) -> None:
            async with worker(tmp_path / f"w{at}", near.url) as one:
                place = await one.fetch(V1, manifest_of(BOTH), deadline_s=30)
            assert {(place / f"f{i}").read_bytes() for i in range(2)} == set(BOTH.values())

        await asyncio.gather(*(fetch(at) for at in range(8)))
        assert far.sent_bytes < ONCE


async def test_a_relay_of_a_relay_is_as_good(tmp_path: Path) -> None:
    async with (
        upstream(BOTH) as far,
        relay(tmp_path / "a", far.url) as first,
        relay(tmp_path / "b", first.url) as second,
        worker(tmp_path / "w", second.url) as one,
    ):
        await one.fetch(V1, manifest_of(BOTH), deadline_s=30)
        assert far.sent_bytes < ONCE


async def test_a_file_is_read_while_it_still_comes(tmp_path: Path) -> None:
    (digest, content) = next(iter(LARGE.items()))
    half, goes_on = len(content) // 2, asyncio.Event()

    async def gate(at: int) -> None:
        if at >= half:
            await goes_on.wait()

    async with upstream(LARGE) as far, relay(tmp_path / "relay", far.url, patience_s=20.0) as near:
        far.gate = gate
        async with aiohttp.ClientSession() as session, session.get(f"{near.url}/sha256/{digest}") as response:
            came = await response.content.readexactly(half - (1 << 16))
            assert not goes_on.is_set()
            goes_on.set()
            assert came + await response.read() == content


@pytest.mark.parametrize(("wanted", "start", "stop"), [("bytes=5-9", 5, 10), ("bytes=8000000-", 8_000_000, 9 << 20)])
@pytest.mark.parametrize("complete", [True, False])
async def test_ranges_are_served_before_and_after_it_is_complete(
    tmp_path: Path, wanted: str, start: int, stop: int, complete: bool
) -> None:
    (digest, content) = next(iter(LARGE.items()))
    async with upstream(LARGE) as far, relay(tmp_path / "relay", far.url) as near:
        url = f"{near.url}/sha256/{digest}"
        if complete:
            await get(url)
        expected = 206, content[start:stop], f"bytes {start}-{stop - 1}/{len(content)}"
        assert await get(url, Range=wanted) == expected
        assert (await get(url, Range=f"bytes={len(content)}-"))[0] == 416


async def test_a_connection_that_breaks_is_taken_up_where_it_broke(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_workers.weights.transfer.rates.MAX_STREAMS", 1)
    broken = False

    async def breaks(at: int) -> None:
        nonlocal broken
        if at >= 8 << 20 and not broken:
            broken = True
            raise ConnectionResetError

    async with upstream(LARGE) as far, relay(tmp_path / "relay", far.url) as near:
        far.gate = breaks
        assert (await get(f"{near.url}/sha256/{next(iter(LARGE))}"))[1] == next(iter(LARGE.values()))
        first, second = far.gets
        assert first == ""
        assert int(second.removeprefix("bytes=").rstrip("-")) > 0


async def test_what_was_asked_for_least_recently_goes_and_what_is_too_large_is_refused(tmp_path: Path) -> None:
    files = named(*(os.urandom(1000) for _ in range(3)), os.urandom(3000))
    one, two, three, large = files
    async with upstream(files) as far, relay(tmp_path / "relay", far.url, max_bytes=2500) as near:
        kept = tmp_path / "relay" / "files"
        for digest in (one, two, one, three):
            assert (await get(f"{near.url}/sha256/{digest}"))[0] == 200
            await until((kept / digest).is_file)
        assert {path.name for path in kept.iterdir()} == {one, three}
        assert (await get(f"{near.url}/sha256/{large}"))[0] == 507
        assert {path.name for path in kept.iterdir()} == {one, three}
        metrics = (await get(f"{near.url}/metrics"))[1].decode()
        for line in (
            "evictions_total 1",
            "files 2",
            "disk_bytes 2000",
            "fetched_bytes_total 3000",
            "sent_bytes_total 4000",
        ):
            assert f"\nrollout_buffer_relay_{line}\n" in metrics


async def test_what_no_upstream_has_is_not_found_and_no_upstream_is_a_bad_gateway(tmp_path: Path) -> None:
    url = f"sha256/{next(iter(LARGE))}"
    async with upstream({}) as far, relay(tmp_path / "a", far.url) as near:
        assert (await get(f"{near.url}/{url}"))[0] == 404
        assert (await get(f"{near.url}/sha256/../../etc/passwd"))[0] == 404
    async with relay(tmp_path / "b", "http://127.0.0.1:9") as near:
        assert (await get(f"{near.url}/{url}"))[0] == 502


@pytest.mark.parametrize("damaged", [True, False])
async def test_files_of_an_earlier_process_are_kept_if_they_are_whole(tmp_path: Path, damaged: bool) -> None:
    digest, content = next(iter(LARGE.items()))
    async with upstream(LARGE) as far:
        asked = 0
        for again in (False, True):
            asked = len(far.gets)
            if again and damaged:
                (tmp_path / "relay" / "files" / digest).write_bytes(content[:-1] + b"?")
            async with relay(tmp_path / "relay", far.url) as near:
                assert (await get(f"{near.url}/sha256/{digest}"))[1] == content
                await until((tmp_path / "relay" / "files" / digest).is_file)
        assert (len(far.gets) > asked) == damaged


async def test_token_and_tls_are_asked_for_and_sent_upstream(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "weights")
    own, access = authority.issue("both"), Access(token="right", tls_ca=authority.cert)
    door = WeightsDoor(access, tls_cert=own.cert, tls_key=own.key)
    with FilesPublisher(tmp_path / "w", serve="http", door=door) as publisher:
        manifest = publisher.write(lambda into: (into / "m").write_bytes(b"model"), term=1, version=1)
        far, digest = manifest.base_url.rpartition("/")[0], manifest.files[0].sha256.hex()
        async with (
            relay(tmp_path / "relay", far, access=access, tls_cert=own.cert, tls_key=own.key) as near,
            aiohttp.ClientSession() as session,
        ):
            trusting = ssl.create_default_context(cafile=str(authority.cert))
            assert near.url.startswith("https://")
            for token, status in (("", 401), ("wrong", 401), ("right", 200)):
                headers = {"Authorization": f"Bearer {token}"}
                async with session.get(f"{near.url}/sha256/{digest}", headers=headers, ssl=trusting) as response:
                    assert response.status == status
                    assert (await response.read() == b"model") == (status == 200)
            async with session.get(f"{near.url}/livez", ssl=trusting) as response:
                assert response.status == 200


async def test_a_limit_on_the_bandwidth_is_that_of_all_files_together(tmp_path: Path) -> None:
    files = named(os.urandom(2_500_000), os.urandom(2_500_000))
    async with upstream(files) as far, relay(tmp_path / "relay", far.url, max_mbps=64.0) as near:
        began = time.monotonic()
        await asyncio.gather(*(get(f"{near.url}/sha256/{digest}") for digest in files))
        assert time.monotonic() - began > 0.35


async def test_a_worker_without_its_publisher_says_so_where_the_relay_has_nothing(tmp_path: Path) -> None:
    async with upstream({}) as far, relay(tmp_path / "relay", far.url) as near, worker(tmp_path / "w", near.url) as one:
        with pytest.raises(WeightsUnavailable, match="0 of 9437184 bytes"):
            await one.fetch(V1, manifest_of(LARGE), deadline_s=1)


def test_the_command_serves_and_ends_in_good_order(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "buffer_cli", "relay", "--upstream", "http://127.0.0.1:9", "--listen"]
    environment = {**os.environ, "RB_LOG_FORMAT": "json"}
    started = subprocess.Popen(
        [*command, "127.0.0.1:0", "--dir", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    with started:
        assert started.stdout is not None
        for line in started.stdout:
            if "serving weights" in line:
                break
        started.send_signal(signal.SIGTERM)
        assert started.wait(10) == 0
    unsent = [*command, "0.0.0.0:0"]
    with_token = {**environment, "RB_WEIGHTS_TOKEN": "t", "RB_INSECURE": ""}
    done = subprocess.run(unsent, capture_output=True, text=True, check=False, env=with_token, timeout=30)
    assert done.returncode == 2
    assert "https alone" in done.stdout + done.stderr
    refused = subprocess.run([*command, "nowhere"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "host:port" in refused.stderr
