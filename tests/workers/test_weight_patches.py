"""Weights of a worker that has an earlier version: only what differs is fetched, and the result is checked as ever."""

import hashlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from rollout_buffer.v1 import weights_pb2
from rollout_workers.versions import Version
from rollout_workers.weights.fetching.fetcher import WeightFetcher
from rollout_workers.weights.server import WeightServer
from rollout_workers.weights.transfer.client import WeightClient
from tests.workers.fetched import V1, V2, V3, left_over, read
from tests.workers.test_peers import Named
from trainer_client.publish.files import FilesPublisher

MODEL = "model.safetensors"
SIZE = 400_000


def model(version: int) -> bytes:
    """Weights of which each version changes one in a hundred."""
    words = np.random.default_rng(0).integers(0, 1 << 16, SIZE // 2, dtype=np.uint16)
    for step in range(version):
        words[step::100] += 1
    return words.tobytes()


def content(version: int) -> dict[str, bytes]:
    return {MODEL: model(version), "tokenizer.json": b"x" * 100_000}


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[FilesPublisher]:
    with FilesPublisher(tmp_path / "published", serve="http", patches=2) as made:
        yield made


@pytest.fixture
async def fetcher(tmp_path: Path) -> AsyncIterator[WeightFetcher]:
    made = fetcher_at(tmp_path / "weights")
    yield made
    await made.close()


def fetcher_at(root: Path, *peers: str) -> WeightFetcher:
    return WeightFetcher(root, owner="w", keep=3, client=WeightClient(stall_s=0.5), peers=Named(*peers))


def publish(publisher: FilesPublisher, version: Version) -> weights_pb2.FilesManifest:
    def save(directory: Path) -> None:
        for name, data in content(version.version).items():
            (directory / name).write_bytes(data)

    manifest = publisher.write(save, term=version.term, version=version.version)
    publisher.published(manifest, committed_steps=0)
    return manifest.listing()


def of(place: Path) -> dict[str, bytes]:
    """Files of a version, without patches that came."""
    return {name: data for name, data in read(place).items() if not name.endswith(".patch")}


def received(fetcher: WeightFetcher) -> int:
    return fetcher._client.received_bytes


def patches_of(manifest: weights_pb2.FilesManifest) -> list[weights_pb2.WeightPatch]:
    return [patch for file in manifest.files for patch in file.patches]


async def test_what_differs_is_fetched_and_the_rest_is_made_of_what_is_here(
    fetcher: WeightFetcher, publisher: FilesPublisher
) -> None:
    await fetcher.fetch(V1, publish(publisher, V1), deadline_s=10)
    before = received(fetcher)
    manifest = publish(publisher, V2)
    (patch,) = patches_of(manifest)
    place = await fetcher.fetch(V2, manifest, deadline_s=10)
    assert of(place) == content(2)
    assert received(fetcher) - before == patch.size_bytes < SIZE / 10
    assert "0.5 MB were made of earlier versions" in fetcher.came_from
    assert left_over(place.parent) == []


async def test_a_worker_that_missed_a_version_takes_the_patch_of_an_older_one(
    fetcher: WeightFetcher, publisher: FilesPublisher
) -> None:
    await fetcher.fetch(V1, publish(publisher, V1), deadline_s=10)
    before = received(fetcher)
    publish(publisher, V2)
    manifest = publish(publisher, V3)
    of_v2, of_v1 = patches_of(manifest)
    assert of(await fetcher.fetch(V3, manifest, deadline_s=10)) == content(3)
    assert received(fetcher) - before == of_v1.size_bytes > of_v2.size_bytes


async def test_a_worker_without_a_base_fetches_whole_files(fetcher: WeightFetcher, publisher: FilesPublisher) -> None:
    publish(publisher, V1)
    manifest = publish(publisher, V2)
    assert patches_of(manifest)
    assert of(await fetcher.fetch(V2, manifest, deadline_s=10)) == content(2)
    assert received(fetcher) == SIZE + 100_000


@pytest.mark.parametrize("lacking", ["the patch is another version's", "the patch is gone", "the base is damaged"])
async def test_a_patch_that_cannot_be_used_costs_a_fetch_of_the_file(
    fetcher: WeightFetcher, publisher: FilesPublisher, lacking: str
) -> None:
    place = await fetcher.fetch(V1, publish(publisher, V1), deadline_s=10)
    publish(publisher, V2)
    manifest = publish(publisher, V3)
    of_v2, of_v1 = patches_of(manifest)
    if lacking == "the patch is gone":
        (publisher.root / manifest.base_url.rpartition("/")[2] / of_v1.name).unlink()
    elif lacking == "the base is damaged":
        damaged = bytearray((place / MODEL).read_bytes())
        damaged[7] ^= 1
        (place / MODEL).write_bytes(damaged)
    else:
        of_v2.base_sha256 = of_v1.base_sha256
        del manifest.files[0].patches[1]
    assert of(await fetcher.fetch(V3, manifest, deadline_s=4)) == content(3)


async def test_a_damaged_file_that_stays_the_same_is_fetched(fetcher: WeightFetcher, publisher: FilesPublisher) -> None:
    place = await fetcher.fetch(V1, publish(publisher, V1), deadline_s=10)
    (place / "tokenizer.json").write_bytes(b"y" * 100_000)
    assert of(await fetcher.fetch(V2, publish(publisher, V2), deadline_s=4)) == content(2)
    assert (place / "tokenizer.json").read_bytes() == b"y" * 100_000


async def test_what_is_removed_is_not_remembered(fetcher: WeightFetcher, publisher: FilesPublisher) -> None:
    for number in range(1, 8):
        version = Version(1, number)
        fetcher.hold(
            "engine", await fetcher.fetch(version, publish(publisher, version), deadline_s=10, engine_id="engine")
        )
    assert len(fetcher._earlier._directories) <= 4


async def test_peers_give_patches_too(tmp_path: Path, fetcher: WeightFetcher, publisher: FilesPublisher) -> None:
    first, second = publish(publisher, V1), publish(publisher, V2)
    server = WeightServer(fetcher.find, host="127.0.0.1", port=0)
    await server.start()
    other = fetcher_at(tmp_path / "other", server.url)
    before = 0
    for manifest, version in ((first, V1), (second, V2)):
        await fetcher.fetch(version, manifest, deadline_s=10)
        manifest.base_url = "http://127.0.0.1:9/gone"
        before = received(other)
        place = await other.fetch(version, manifest, deadline_s=10)
        assert of(place) == content(version.version)
    assert received(other) - before == patches_of(second)[0].size_bytes
    await other.close()
    await server.close()


def test_files_that_bear_a_patchs_name_stay(publisher: FilesPublisher) -> None:
    publish(publisher, V1)
    second = publisher.root / publish(publisher, V2).base_url.rpartition("/")[2]
    again = publisher.write(lambda directory: _changed(second, directory), term=1, version=3)
    directory = publisher.root / again.base_url.rpartition("/")[2]
    assert {path.name for path in second.iterdir()} <= {file.name for file in again.files}
    assert all((directory / file.name).is_file() for file in again.files)


def _changed(source: Path, directory: Path) -> None:
    """Copy a version with its patches, and the model of another one."""
    for path in source.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    (directory / MODEL).write_bytes(model(3))


def test_a_publisher_that_starts_anew_offers_the_same_patches(tmp_path: Path, publisher: FilesPublisher) -> None:
    publish(publisher, V1)
    manifest = publish(publisher, V2)
    publisher.close()
    with FilesPublisher(publisher.root, serve="http", patches=2) as anew:
        assert anew.manifest_of(2).listing() == manifest
    for file in manifest.files:
        for patch in file.patches:
            stored = publisher.root / manifest.base_url.rpartition("/")[2] / patch.name
            assert hashlib.sha256(stored.read_bytes()).digest() == patch.sha256
