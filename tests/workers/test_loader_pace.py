"""Loads where publishes keep pace with them: an engine that gets on stays in service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.workers.building import time_passes
from tests.workers.fake_service import FakeService
from tests.workers.loading import Loading, loading
from tests.workers.test_rolling import Hold


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
            await it.until(lambda version=version: f"load 1.{version}" in it.engine.calls)  # type: ignore[misc]
            await it.publish(1, version + 1)
            await it.until(lambda version=version: it.slot.reloads == version)  # type: ignore[misc]
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
