"""Workers that share a directory of weights: one brings a version, and none waits for one that failed or hangs."""

import asyncio
import errno
import fcntl
from pathlib import Path

import pytest

from rollout_buffer.v1 import weights_pb2
from rollout_workers.errors import WeightsUnavailable
from rollout_workers.weights.fetching.copy import take_file
from rollout_workers.weights.fetching.fetcher import WeightFetcher
from tests.workers.building import weight_files
from tests.workers.fetched import CONTENT, V1, left_over, read, what_is_in


async def test_two_workers_that_share_a_directory_both_get_the_files(tmp_path: Path) -> None:
    manifest = weight_files(tmp_path / "source", CONTENT)
    fetchers = [WeightFetcher(tmp_path / "weights", owner=owner, keep=2) for owner in ("a", "b")]
    places = await asyncio.gather(*(fetcher.fetch(V1, manifest, deadline_s=10) for fetcher in fetchers))
    assert places[0] == places[1]
    assert read(places[0]) == CONTENT
    assert left_over(tmp_path / "weights") == []


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were linked or copied, by whomever."""
    names: list[str] = []

    def noted(label: str, source: Path, file: weights_pb2.WeightFile, target: Path) -> None:
        names.append(file.name)
        take_file(label, source, file, target)

    monkeypatch.setattr("rollout_workers.weights.fetching.fetcher.take_file", noted)
    return names


def sharing(tmp_path: Path, count: int) -> list[WeightFetcher]:
    return [WeightFetcher(tmp_path / "weights", owner=f"w{i}", keep=2) for i in range(count)]


async def test_of_workers_that_share_a_directory_one_brings_a_version(tmp_path: Path, taken: list[str]) -> None:
    manifest = weight_files(tmp_path / "source", CONTENT)
    places = await asyncio.gather(*(each.fetch(V1, manifest, deadline_s=20) for each in sharing(tmp_path, 3)))
    assert sorted(taken) == sorted(CONTENT)
    assert [read(place) for place in places] == [CONTENT] * 3
    assert what_is_in(tmp_path / "weights") == [places[0].name]


async def test_the_next_worker_takes_over_from_one_that_failed(tmp_path: Path, taken: list[str]) -> None:
    manifest = weight_files(tmp_path / "source", CONTENT)
    (tmp_path / "source" / "config.json").rename(tmp_path / "aside")
    first, second = sharing(tmp_path, 2)
    failed, _ = await asyncio.gather(
        first.fetch(V1, manifest, deadline_s=20), second.fetch(V1, manifest, deadline_s=20), return_exceptions=True
    )
    assert isinstance(failed, WeightsUnavailable)
    assert taken.count("config.json") == 2
    assert what_is_in(tmp_path / "weights") == []


async def test_a_worker_that_hangs_is_not_waited_for_too_long(tmp_path: Path, taken: list[str]) -> None:
    manifest = weight_files(tmp_path / "source", CONTENT)
    (fetcher,) = sharing(tmp_path, 1)
    place = await fetcher.fetch(V1, manifest, deadline_s=20)
    place.rename(tmp_path / "aside")
    with (place.parent / f".{place.name}.lock").open("ab") as hanging:
        fcntl.flock(hanging, fcntl.LOCK_EX)
        taken.clear()
        assert read(await fetcher.fetch(V1, manifest, deadline_s=2)) == CONTENT
    assert sorted(taken) == sorted(CONTENT)


async def test_file_systems_without_locks_will_do(
    tmp_path: Path, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    manifest = weight_files(tmp_path / "source", CONTENT)
    for fetcher in sharing(tmp_path, 2):
        assert read(await fetcher.fetch(V1, manifest, deadline_s=20)) == CONTENT
    assert sorted(taken) == sorted(CONTENT)


async def test_lock_that_cannot_be_opened_holds_nobody_up(tmp_path: Path) -> None:
    manifest = weight_files(tmp_path / "source", CONTENT)
    (fetcher,) = sharing(tmp_path, 1)
    place = await fetcher.fetch(V1, manifest, deadline_s=20)
    place.rename(tmp_path / "aside")
    # Another user's file would be refused as well, though not to root.
    (place.parent / f".{place.name}.lock").mkdir()
    assert read(await fetcher.fetch(V1, manifest, deadline_s=5)) == CONTENT
