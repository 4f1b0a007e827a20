"""Weight files of a hostile server: what it answers, connection by connection, to a worker that fetches a version.

The first byte says who it is, modulo 5: the publisher; a mirror, a peer or the upstream of a relay beside an honest
publisher, from whom the files have to come then; mirror and peer of files that nobody else has. The next says, by its
lowest bit, that there is a patch. The rest are answers as they are sent, with NEXT between them; the last one is
repeated. In them SIZE, CONTENT and PATCH stand for the truth, BIG for 4 MiB, and STALL for a silence.
"""

import asyncio
import hashlib
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from buffer_wire.weights.patch import write_patch
from rollout_buffer.v1 import weights_pb2
from rollout_workers.errors import WeightsInvalid, WeightsUnavailable
from rollout_workers.relay.options import RelayOptions
from rollout_workers.relay.server import Relay
from rollout_workers.versions import Version
from rollout_workers.weights.fetching.fetcher import WeightFetcher
from rollout_workers.weights.transfer import pieces, rates
from rollout_workers.weights.transfer.client import WeightClient
from tests.fuzz.guided.promises import said_in_short
from tests.workers.building import weight_files
from tests.workers.fetched import read

PUBLISHER, MIRROR, PEER, ALONE, UPSTREAM = b"\0", b"\1", b"\2", b"\3", b"\4"
WHOLE, PATCHED = b"\0", b"\1"
NEXT = b"NEXT"
NAME = "model.safetensors"
STALL_S, DEADLINE_S = 0.3, 8.0
MOST_SENT = 1 << 20
V1, V2 = Version(1, 1), Version(1, 2)
# Files of a few pieces, over several connections: as those of gigabytes are fetched.
pieces.PIECE_BYTES, rates._PER_STREAM_S = 512, 1e-4
_PLACE = Path(tempfile.mkdtemp(prefix="fuzz-peers-"))
_OLD = np.random.default_rng(0).integers(0, 256, 2_500, dtype=np.uint8).tobytes()
_NEW = bytes(100) + _OLD[100:]

_OK = b"HTTP/1.1 200 OK\r\nContent-Length: SIZE\r\n\r\nCONTENT"
SEEDS = (
    PUBLISHER + WHOLE + _OK,
    PUBLISHER + WHOLE + b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9c4\r\nCONTENT\r\n0\r\n\r\n",
    PUBLISHER + PATCHED + b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nPATCH" + NEXT + _OK,
    PUBLISHER + WHOLE + b"HTTP/1.1 200 OK\r\nContent-Length: SIZE\r\n\r\nCON" + NEXT
    + b"HTTP/1.1 206 OK\r\nContent-Range: bytes 3-2499/2500\r\nContent-Length: 2497\r\n\r\nBIG",
    PUBLISHER + WHOLE + b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n" + NEXT + _OK,
    MIRROR + WHOLE + _OK,
    MIRROR + WHOLE + b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4194304\r\n\r\nBIG",
    MIRROR + WHOLE + b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-511/2500\r\nContent-Length: 512\r\n\r\nBIGSTALL",
    PEER + WHOLE + b"HTTP/1.1 401 No\r\nWWW-Authenticate: Bearer\r\nContent-Length: 0\r\n\r\n" + NEXT + b"STALL",
    PEER + PATCHED + b"HTTP/1.1 416 No\r\nContent-Range: bytes */0\r\n\r\n" + NEXT + b"HTTP/1.0 200 OK\r\n\r\nCONTENT",
    UPSTREAM + WHOLE + b"HTTP/1.1 200 OK\r\nContent-Length: SIZE\r\n\r\n" + NEXT + _OK,
    UPSTREAM + WHOLE + b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n" + NEXT + b"STALL",
    ALONE + WHOLE + b"HTTP/1.1 100 Continue\r\n\r\n" + _OK + NEXT + b"HTTP/1.1 500 No\r\nContent-Length: 1\r\n\r\nx",
)  # fmt: skip


class _Server:
    """The honest publisher below /honest/, and elsewhere whatever the input says."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        server = self.loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self.answers: list[bytes] = []
        self.asked: list[bytes] = []
        self.client = WeightClient(stall_s=STALL_S)
        self.files: dict[bytes, bytes] = {}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split(b" ")[1]
                if path.startswith(b"/honest/"):
                    writer.write(self._honest(path.removeprefix(b"/honest/"), head))
                    continue
                self.asked.append(path)
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                said, stalls, _ = answer.partition(b"STALL")
                writer.write(said)
                await writer.drain()
                if stalls:
                    await reader.read()  # Until the worker goes.
                break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _honest(self, name: bytes, head: bytes) -> bytes:
        content = self.files[name]
        asked = re.search(rb"Range: bytes=(\d+)-(\d*)", head)
        if asked is None:
            return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content) + content
        start, stop = int(asked[1]), int(asked[2] or len(content) - 1) + 1
        told = b"Content-Range: bytes %d-%d/%d\r\nContent-Length: %d" % (start, stop - 1, len(content), stop - start)
        return b"HTTP/1.1 206 OK\r\n" + told + b"\r\n\r\n" + content[start:stop]


class _Named:
    def __init__(self, *urls: str) -> None:
        self._urls = urls

    async def with_version(self, _: Version) -> Sequence[str]:
        return self._urls


_SERVER: list[_Server] = []


def one(data: bytes) -> None:
    """A worker has the files as the manifest says, or a reason; no hostile server keeps an honest one away."""
    if not _SERVER:
        _SERVER.append(_Server())
    _SERVER[0].loop.run_until_complete(_fetched(_SERVER[0], data))


async def _fetched(server: _Server, data: bytes) -> None:
    role, flags = (*data[:2], 0, 0)[:2]
    role, patched = role % 5, bool(flags & 1)
    root = _PLACE / "weights"
    shutil.rmtree(root, ignore_errors=True)
    manifest, patch = _manifest(server, patched=patched)
    hostile, honest = f"{server.url}/w", role in (MIRROR[0], PEER[0], UPSTREAM[0])
    manifest.base_url = f"{server.url}/honest" if honest else "/nowhere" if role == ALONE[0] else hostile
    if role in (MIRROR[0], ALONE[0]):
        manifest.mirrors.append(hostile)
    server.answers, server.asked = [_answer(each, patch) for each in data[2:].split(NEXT)], []
    server.client.rates = rates.Rates()
    peers = _Named(f"{hostile}/1.2") if role in (PEER[0], ALONE[0]) else _Named()
    relay = None
    if role == UPSTREAM[0]:
        relay = Relay(
            RelayOptions((hostile,), "127.0.0.1:0", root / "relay", 1 << 20, patience_s=STALL_S, drain_grace_s=0)
        )
        await relay.start()
        manifest.mirrors.append(relay.url)
    fetcher = WeightFetcher(root, owner="w", keep=2, client=server.client, peers=peers, prefer_peers=True)
    refusal = ""
    try:
        if patched:
            await fetcher.fetch(V1, weight_files(_PLACE / "old", {NAME: _OLD}), deadline_s=DEADLINE_S, engine_id="e")
        place = await fetcher.fetch(V2, manifest, deadline_s=DEADLINE_S, wanted=lambda: honest)
        assert {NAME: read(place)[NAME]} == {NAME: _NEW}, "another content"
    except (WeightsInvalid, WeightsUnavailable) as error:
        refusal = str(error)
        said_in_short(refusal)
    finally:
        await fetcher.close()
        if relay is not None:
            await relay.close()
    assert not (honest and refusal), f"the honest publisher was kept away: {refusal}"
    left = [path.name for path in root.glob(".*.part-*")]
    assert not left, left
    if role != PUBLISHER[0]:
        assert all(path.startswith(b"/w/") for path in server.asked), server.asked
    assert len(server.asked) <= 200, f"{len(server.asked)} requests"


def _manifest(server: _Server, *, patched: bool) -> tuple[weights_pb2.FilesManifest, bytes]:
    manifest = weight_files(_PLACE / "new", {NAME: _NEW})
    made = _PLACE / "patch"
    if not made.exists():
        (_PLACE / "base").write_bytes(_OLD)
        write_patch(_PLACE / "base", _PLACE / "new" / NAME, made, max_bytes=1 << 20)
    patch = made.read_bytes()
    if patched:
        sha256 = hashlib.sha256(patch).digest()
        base = hashlib.sha256(_OLD).digest()
        manifest.files[0].patches.add(name="a.patch", size_bytes=len(patch), sha256=sha256, base_sha256=base)
    server.files = {NAME.encode(): _NEW, b"a.patch": patch}
    return manifest, patch


def _answer(given: bytes, patch: bytes) -> bytes:
    # No redirect leads to another machine from here.
    given = re.sub(rb"(?i)location:(?!\s*/[\w-])", b"X:", given)
    for word, stands_for in (
        (b"CONTENT", _NEW),
        (b"PATCH", patch),
        (b"SIZE", b"%d" % len(_NEW)),
        (b"BIG", bytes(4 << 20)),
    ):
        given = given.replace(word, stands_for, 1)
    return given
