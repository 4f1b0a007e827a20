"""Adapters as the loader brings them to an engine: without a pause, and what follows when something fails."""

import asyncio
from pathlib import Path

import numpy as np

from rollout_workers.engine.types import SampleRequest
from rollout_workers.slots.engine_state import Event
from tests.workers.building import time_passes
from tests.workers.fake_service import FakeService
from tests.workers.loading import Loading, loading


def request(tokens: int) -> SampleRequest:
    return SampleRequest(sample_index=0, input_ids=np.zeros(3, np.int32), max_new_tokens=tokens, min_new_tokens=tokens)


async def begun(it: Loading) -> None:
    """Return when a request is with the engine."""
    while not (await it.engine.load()).running:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0)


async def test_adapter_is_loaded_while_the_engine_generates(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path, tokens_per_s=100.0) as it:
        await it.until_loaded(1, 0)
        making = asyncio.create_task(it.slot.generate([request(30)], deadline_s=10))
        await begun(it)
        await it.publish_adapter(1, 1)
        await it.until_loaded(1, 1)
        (first,) = await making
        (second,) = await it.slot.generate([request(1)], deadline_s=10)
        assert it.engine.calls == ["adapter 1.1"]
        assert [span.version_label for sample in (first, second) for span in sample.spans] == ["0", "1.1"]
        assert (it.state, it.slot.reloads, it.slot.errors) == ("READY", 1, 0)


async def test_other_weights_replace_an_adapter_and_end_what_runs_under_it(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path, tokens_per_s=10.0) as it:
        await it.publish_adapter(1, 1)
        await it.until_loaded(1, 1)
        making = asyncio.create_task(it.slot.generate([request(500)], deadline_s=20))
        await begun(it)
        await it.publish(1, 2)
        await it.until_loaded(1, 2)
        (sample,) = await making
        assert sample.finish_reason == "abort"
        assert {span.version_label for span in sample.spans} <= {"1.1"}
        assert it.engine.calls == ["adapter 1.1", "pause retract", "load 1.2", "resume"]
        assert not it.slot.can_adapt


async def test_adapter_for_an_engine_with_other_weights_waits_for_a_start_anew(
    fake: FakeService, tmp_path: Path
) -> None:
    async with loading(fake, tmp_path) as it:
        await it.publish(1, 1)
        await it.until_loaded(1, 1)
        await it.publish_adapter(1, 2)
        await it.until(lambda: it.slot.errors > 0)
        assert "goes onto the weights that engines start with, and this one holds 1.1" in it.slot.last_error
        assert it.slot.leasable
        await it.engine.die()
        await it.engine.revive()
        await it.slot.refresh()
        await it.until_loaded(1, 2)
        assert it.engine.calls[-1] == "adapter 1.2"


class Hold:
    """An evaluation that keeps the weights until `over` is set."""

    def __init__(self) -> None:
        self.asked, self.over = asyncio.Event(), asyncio.Event()

    @property
    def active(self) -> bool:
        return not self.over.is_set()

    async def released(self) -> None:
        self.asked.set()
        await self.over.wait()


async def test_evaluation_keeps_the_adapter_that_it_began_with(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path, timeout_s=0.3) as it:
        await it.publish_adapter(1, 1)
        await it.until_loaded(1, 1)
        it.slot.hold = hold = Hold()
        await it.publish_adapter(1, 2)
        await hold.asked.wait()
        await it.publish_adapter(1, 3)  # Superseded while it waits: the newest is taken.
        assert await it.watcher.changes.until(lambda: it.watcher.latest.version.version == 3, 10)  # type: ignore[union-attr]
        await time_passes(0.4)  # Longer than a load may take: others' time does not count.
        assert (it.engine.calls, it.state) == (["adapter 1.1"], "READY")
        hold.over.set()
        await it.until_loaded(1, 3)
        assert it.engine.calls == ["adapter 1.1", "adapter 1.3"]


async def test_resume_at_version_zero_drops_the_adapter(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.publish_adapter(1, 1)
        await it.until_loaded(1, 1)
        await it.fake.publish(2, 0)
        await it.until_loaded(2, 0)
        assert it.engine.calls == ["adapter 1.1", "no adapter"]
        assert it.slot.pristine
        await it.publish_adapter(2, 1)
        await it.until_loaded(2, 1)


async def test_load_that_fails_leaves_the_adapter_before_in_force(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.publish_adapter(1, 1)
        await it.until_loaded(1, 1)
        it.engine.fail_next_loads(1)
        await it.publish_adapter(1, 2)
        await it.until(lambda: it.slot.errors == 1)
        assert it.slot.loaded.label == "1.1"
        assert it.slot.leasable
        await it.until_loaded(1, 2)
        assert it.engine.calls == ["adapter 1.1", "adapter 1.2", "adapter 1.2"]


async def test_engine_that_is_quarantined_for_its_adapter_rejoins_with_it(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path, timeout_s=0.3) as it:
        await it.until_loaded(1, 0)
        it.engine.fail_next_loads(3)
        await it.publish_adapter(1, 1)
        await it.until(lambda: it.slot.quarantined)
        await it.until_loaded(1, 1)
        await it.until(lambda: it.state == "READY")


async def test_engine_that_has_lost_its_adapter_gets_the_newest(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.publish_adapter(1, 1)
        await it.until_loaded(1, 1)
        it.slot.move(Event.LOST)
        await it.engine.die()
        await it.engine.revive()
        assert await it.engine.loaded_version() == "0"
        await it.slot.refresh()
        it.slot.move(Event.BACK)
        await it.publish_adapter(1, 2)
        await it.until_loaded(1, 2)
        assert it.engine.calls[-1] == "adapter 1.2"
