"""Tests of which fetched versions stay on the disk, and for whom."""

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollout_buffer.v1 import weights_pb2
from rollout_workers.versions import Version
from rollout_workers.weights.fetching.fetcher import WeightFetcher
from rollout_workers.weights.fetching.pins import LOCKS, Pin, remove_unpinned
from tests.workers.building import weight_files

V1, V2, V3 = Version(1, 1), Version(1, 2), Version(1, 3)
PINS_UNTIL_KILLED = """
import sys
from pathlib import Path
from rollout_workers.weights.fetching.pins import Pin
assert Pin.at(Path(sys.argv[1])) is not None
print("pinned", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def manifest(tmp_path: Path) -> weights_pb2.FilesManifest:
    return weight_files(tmp_path / "source", {"model.safetensors": b"weights"})


@pytest.fixture
async def fetcher(tmp_path: Path) -> AsyncIterator[WeightFetcher]:
    made = WeightFetcher(tmp_path / "weights", owner="w", keep=1)
    yield made
    await made.close()


def kept(tmp_path: Path) -> set[str]:
    """Everything in the directory, what is being removed or brought included."""
    return {path.name.partition("-")[0] for path in (tmp_path / "weights").iterdir() if path.name != LOCKS}


async def bring(fetcher: WeightFetcher, engine_id: str, version: Version, manifest: weights_pb2.FilesManifest) -> Path:
    """Bring it as for an engine that loads it at once."""
    place = await fetcher.fetch(version, manifest, deadline_s=10, engine_id=engine_id)
    fetcher.hold(engine_id, place)
    return place


async def test_version_is_kept_while_an_engine_loads_it_slowly(
    fetcher: WeightFetcher, tmp_path: Path, manifest: weights_pb2.FilesManifest
) -> None:
    place = await fetcher.fetch(V1, manifest, deadline_s=10, engine_id="slow")
    for version in (V2, V3):
        await bring(fetcher, "quick", version, manifest)
        assert (place / "model.safetensors").read_bytes() == b"weights"
    assert kept(tmp_path) == {"1.1", "1.3"}
    fetcher.hold("slow", place)
    assert kept(tmp_path) == {"1.1", "1.3"}
    await bring(fetcher, "slow", V3, manifest)
    assert kept(tmp_path) == {"1.3"}


async def test_version_whose_load_was_given_up_is_let_go_with_the_next_fetch(
    fetcher: WeightFetcher, tmp_path: Path, manifest: weights_pb2.FilesManifest
) -> None:
    await fetcher.fetch(V1, manifest, deadline_s=10, engine_id="slow")
    await fetcher.fetch(V2, manifest, deadline_s=10, engine_id="slow")
    await bring(fetcher, "quick", V3, manifest)
    assert kept(tmp_path) == {"1.2", "1.3"}


async def test_what_another_worker_loads_or_uses_is_kept(
    fetcher: WeightFetcher, tmp_path: Path, manifest: weights_pb2.FilesManifest
) -> None:
    other = WeightFetcher(tmp_path / "weights", owner="evaluations", keep=1)
    await bring(other, "theirs", V1, manifest)
    await other.fetch(V2, manifest, deadline_s=10, engine_id="theirs")
    await bring(fetcher, "ours", V3, manifest)
    assert kept(tmp_path) == {"1.1", "1.2", "1.3"}
    await other.close()
    await bring(fetcher, "ours", V3, manifest)
    assert kept(tmp_path) == {"1.3"}


async def test_versions_of_an_earlier_run_of_the_name_are_the_first_to_go(
    fetcher: WeightFetcher, tmp_path: Path, manifest: weights_pb2.FilesManifest
) -> None:
    for name in ("1.499-abc", "1.500-abc"):
        (tmp_path / "weights" / name).mkdir(parents=True)
        os.utime(tmp_path / "weights" / name, (1_000, 1_000))
    await bring(fetcher, "e0", V1, manifest)
    assert kept(tmp_path) == {"1.1"}
    await bring(fetcher, "e1", V2, manifest)
    await bring(fetcher, "e0", V2, manifest)
    assert kept(tmp_path) == {"1.2"}


async def test_without_locks_the_engines_of_one_worker_keep_theirs(
    fetcher: WeightFetcher, tmp_path: Path, manifest: weights_pb2.FilesManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    await fetcher.fetch(V1, manifest, deadline_s=10, engine_id="slow")
    for version in (V2, V3):
        await bring(fetcher, "quick", version, manifest)
    assert kept(tmp_path) == {"1.1", "1.3"}


def test_pin_of_a_worker_that_was_killed_is_none(tmp_path: Path) -> None:
    place, aside = tmp_path / "1.1-abc", tmp_path / ".aside"
    place.mkdir()
    (place / "model").write_bytes(b"weights")
    with subprocess.Popen(
        [sys.executable, "-c", PINS_UNTIL_KILLED, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"pinned\n"
        remove_unpinned(place, aside)
        assert (place / "model").read_bytes() == b"weights"
        worker.kill()
    remove_unpinned(place, aside)
    assert [path.name for path in tmp_path.rglob("*")] == [LOCKS]


def test_directory_that_is_being_removed_cannot_be_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, aside = tmp_path / "1.1-abc", tmp_path / ".aside"
    place.mkdir()
    pins: list[Pin | None] = []
    rename = Path.rename

    def looked_at(path: Path, target: Path) -> Path:
        pins.append(Pin.at(path))
        moved = rename(path, target)
        pins.append(Pin.at(path))
        return moved

    monkeypatch.setattr(Path, "rename", looked_at)
    remove_unpinned(place, aside)
    assert pins == [None, None]
    assert [path.name for path in tmp_path.rglob("*")] == [LOCKS]
