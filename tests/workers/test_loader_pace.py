"""Loads where publishes keep pace with them: an engine that gets on stays in service, and does get on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout_workers.versions import Version
from rollout_workers.weights import loader
from tests.workers.building import time_passes
from tests.workers.fake_service import FakeService
from tests.workers.loading import Loading, loading
from tests.workers.test_rolling import Hold, loads


@asynccontextmanager
async def never_quarantined(it: Loading) -> AsyncIterator[None]:
    """Fails if the engine is in quarantine at any time."""
    seen = asyncio.create_task(it.slot.changes.until(lambda: it.slot.quarantined))
    yield
    was = seen.done()
    seen.cancel()
    assert not was, it.slot.last_error


async def test_every_load_has_the_whole_time_for_itself(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path, timeout_s=1.0, load_s=0.2) as it, never_quarantined(it):
        await it.publish(1, 1)
        for version in range(1, 9):
            # There is always something newer when a load ends: the engine never has the newest.
            await it.until(lambda version=version: f"load 1.{version}" in it.engine.calls)
            await it.publish(1, version + 1)
            await it.until(lambda version=version: it.slot.reloads == version)
        assert (it.slot.errors, it.slot.last_error) == (0, "")


async def test_wait_for_a_version_that_is_superseded_meanwhile_is_others_time(
    fake: FakeService, tmp_path: Path
) -> None:
    async with loading(fake, tmp_path, timeout_s=0.5) as it, never_quarantined(it):
        await it.until_loaded(1, 0)
        hold = it.slot.hold = Hold()
        await it.publish(1, 1)
        await hold.asked.wait()
        await it.publish(1, 2)
        await time_passes(0.6)
        hold.let_go()
        await it.until_loaded(1, 2)


# ── fetches that are slower than publishes ───────────────────────────────────


def superseding(it: Loading, monkeypatch: pytest.MonkeyPatch, successors: dict[Version, Version]) -> None:
    """Have each of these versions superseded by another one while it is fetched."""
    fetch = it.fetcher.fetch

    async def slow(version: Version, *args: Any, **more: Any) -> Path:
        place = await fetch(version, *args, **more)
        if version in successors:
            newer = successors[version]
            await it.publish(newer.term, newer.version)
            assert await it.watcher.changes.until(lambda: it.watcher.latest is not None, 5)
            assert await it.watcher.changes.until(lambda: it.watcher.latest.version == newer, 5)  # type: ignore[union-attr]
        return place

    monkeypatch.setattr(it.fetcher, "fetch", slow)


async def test_engine_whose_fetches_are_slower_than_publishes_gets_on(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loading(fake, tmp_path, timeout_s=2.0) as it, never_quarantined(it):
        superseding(it, monkeypatch, {Version(1, n): Version(1, n + 1) for n in range(1, 6)})
        await it.publish(1, 1)
        await it.until_loaded(1, 6)
        # One is skipped, as after any publish that comes too early, and then none.
        assert loads(it) == [f"load 1.{n}" for n in range(2, 7)]


async def test_one_version_that_is_superseded_while_it_is_fetched_is_skipped(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loading(fake, tmp_path) as it:
        superseding(it, monkeypatch, {Version(1, n): Version(1, n + 1) for n in (1, 3)})
        await it.publish(1, 1)
        await it.until_loaded(1, 2)
        await it.publish(1, 3)
        await it.until_loaded(1, 4)
        assert loads(it) == ["load 1.2", "load 1.4"]


async def test_version_of_a_term_that_is_over_is_never_loaded(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        superseding(it, monkeypatch, {Version(1, 5): Version(1, 6), Version(1, 6): Version(2, 3)})
        await it.publish(1, 5)
        await it.until_loaded(2, 3)
        assert loads(it) == ["load 2.3"]


async def test_slow_fetch_that_has_cost_the_turn_costs_no_second_one(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_FETCH_IN_LINE_S", 0.05)
    fake.max_unavailable = 1
    fake.permits.add("somebody")
    async with loading(fake, tmp_path) as it, never_quarantined(it):
        await it.until_loaded(1, 0)
        await it.publish(1, 1)
        await it.until(lambda: it.permits.wanted)
        fetch = it.fetcher.fetch

        async def slow(*args: Any, **more: Any) -> Path:
            await it.until(lambda: not it.permits.wanted)
            return await fetch(*args, **more)

        with monkeypatch.context() as while_slow:
            while_slow.setattr(it.fetcher, "fetch", slow)
            await it.publish(1, 2)
            await it.until(lambda: not it.permits.wanted)
            await it.until(lambda: it.permits.wanted)
        await it.publish(1, 3)
        assert await it.watcher.changes.until(lambda: it.watcher.latest.version == Version(1, 3), 5)  # type: ignore[union-attr]
        fake.permits.clear()
        await it.until_loaded(1, 3)
        assert loads(it) == ["load 1.2", "load 1.3"]
