"""Manifests of weights: as the service takes them in a publish, and as a worker reads what a service says.

The worker's side is asked of every manifest, of a service that checks nothing too. Nobody serves: a fetch ends with the
name of what is wrong, or of whom it did not get the files from, and leaves nothing behind.
"""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
from google.protobuf.message import DecodeError

from buffer_service.rpc import integers
from buffer_service.rpc.convert import weights
from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import weights_pb2
from rollout_workers.errors import WeightsInvalid, WeightsUnavailable
from rollout_workers.versions import Version
from rollout_workers.weights.fetching.fetcher import WeightFetcher
from rollout_workers.weights.transfer.client import WeightClient
from rollout_workers.weights.watcher import Published
from tests.fuzz.guided.promises import refused_by_name, said_in_short
from tests.support.rpc import manifest
from tests.workers.building import weight_files

PUBLISH = b"\0"
_PLACE = Path(tempfile.mkdtemp(prefix="fuzz-manifests-"))
_HERE = weight_files(_PLACE / "source", {"a.safetensors": b"1", "b/c.json": b"{}", "adapter_config.json": b"{}"})
_LOOP = asyncio.new_event_loop()


def _seed(**kind: Any) -> bytes:
    request = weights_pb2.PublishRequest(term=1, version=1, manifest=weights_pb2.WeightManifest(**kind))
    return PUBLISH + request.SerializeToString()


_PATCHED = weights_pb2.FilesManifest()
_PATCHED.CopyFrom(_HERE)
_PATCHED.base_url, _PATCHED.mirrors[:] = "http://h:1/w", ["https://m:2", "http://[::1]:3/x"]
_PATCHED.files[0].patches.add(name="a.patch", size_bytes=9, sha256=bytes(32), base_sha256=bytes(32))
SEEDS = (
    _seed(files=_HERE),
    _seed(files=_PATCHED),
    _seed(files=manifest(url="file:///nowhere").files),
    _seed(tensors=weights_pb2.TensorsManifest(files=_PATCHED)),
    _seed(adapter=weights_pb2.AdapterManifest(files=_HERE)),
    _seed(collective=weights_pb2.CollectiveManifest(membership=1), fallback=_HERE),
)


class _Nobody(WeightClient):
    """Client whose servers are all away."""

    def get(self, url: str, headers: dict[str, str], *, may_redirect: bool = False) -> Any:
        del headers, may_redirect
        assert url.lower().startswith(("http://", "https://")), url
        return _Away()


class _Away:
    async def __aenter__(self) -> aiohttp.ClientResponse:
        raise aiohttp.ClientConnectionError("nobody is there")

    async def __aexit__(self, *_: object) -> None:
        pass


_NOBODY = _Nobody()


def one(data: bytes) -> None:
    """A publish is refused by name, or a worker makes of it what it can, by name too."""
    try:
        request = weights_pb2.PublishRequest.FromString(data[1:])
    except DecodeError:
        return
    try:
        integers.check(request)
        weights.publish(request)
    except InvalidField as error:
        refused_by_name(error)
    _LOOP.run_until_complete(_fetched(Published.of(Version(1, 1), request.manifest)))


async def _fetched(published: Published) -> None:
    if published.files is None:
        return
    fetcher = WeightFetcher(_PLACE / "weights", owner="w", keep=1, client=_NOBODY)
    try:
        place = await fetcher.fetch(published.version, published.files, deadline_s=5, wanted=lambda: False)
        names = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
        assert names == {file.name for file in published.files.files}, names
    except (WeightsInvalid, WeightsUnavailable) as error:
        said_in_short(str(error))
    finally:
        await fetcher.close()
    fetcher.release("nobody")
    left = [path.name for path in (_PLACE / "weights").glob(".*.part-*")]
    assert not left, left
