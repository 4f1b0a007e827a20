"""Collective updates of engines that are lost, stuck or started anew, of workers that begin or end in the middle."""

from pathlib import Path

import pytest

from rollout_workers.engine.errors import EngineUnavailable
from rollout_workers.slots.engine_state import Event
from rollout_workers.versions import BASE
from tests.workers.building import time_passes
from tests.workers.fake_service import FakeService
from tests.workers.loading import Loading, loading
from tests.workers.planning import ABANDONED, BROADCAST, PREPARE, broadcast_manifest, plan, prepared, received


async def test_broadcast_that_another_process_prepared_is_refused(fake: FakeService, tmp_path: Path) -> None:
    await fake.announce(plan(1, BROADCAST))
    async with loading(fake, tmp_path) as it:
        await fake.until(lambda: "started after the engine had been prepared" in fake.engine().last_error)
        await it.until_loaded(1, 0)
        assert it.slot.membership == 0
        # The trainer's broadcast ends at once where the engine is still in the group.
        assert it.engine.calls == ["leave g1"]


async def test_engine_that_was_started_anew_does_not_join_the_group_that_its_last_process_was_in(
    fake: FakeService, tmp_path: Path
) -> None:
    async with loading(fake, tmp_path) as it:
        await received(it, 1)
        await fake.publish(1, 1, broadcast_manifest(fallback=it.files(1, 1)))
        await it.until_loaded(1, 1)
        # As the guard does.
        it.slot.move(Event.LOST)
        await it.engine.die()
        await it.engine.revive()
        await it.slot.refresh()
        it.engine.calls.clear()
        # The trainer has not noticed.
        await fake.announce(plan(2, PREPARE, established=True))
        it.slot.move(Event.BACK)
        await fake.until(lambda: "not in the group that the update is for" in fake.engine().last_error)
        await it.until_loaded(1, 1)
        assert [call for call in it.engine.calls if call.startswith(("join", "leave"))] == ["leave g1"]
        await fake.announce(plan(2, PREPARE, membership=2))
        await fake.until(lambda: fake.engine().prepared.version == 2)


async def test_engine_in_an_established_group_takes_part(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await received(it, 1)
        await fake.publish(1, 1, broadcast_manifest())
        await it.until_loaded(1, 1)
        await received(it, 2, established=True)
        assert (it.slot.membership, it.slot.errors) == (1, 0)


async def test_lost_engine_is_out_of_its_group(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await prepared(it)
        # As the guard does for an engine that was started anew.
        it.slot.move(Event.LOST)
        await it.engine.die()
        await it.engine.revive()
        await it.slot.refresh()
        it.slot.move(Event.BACK)
        await it.until_loaded(1, 0)
        assert (it.slot.membership, it.slot.prepared) == (0, None)


async def get_stuck(it: Loading, fake: FakeService) -> None:
    """The engine hangs in its group when the plan is abandoned, and is quarantined for that."""
    await prepared(it)
    it.engine.stall()
    it.engine.options = it.engine.options.__class__(control_timeout_s=0.1, load_s=0.001)
    await fake.announce(plan(1, ABANDONED))
    await it.until(lambda: it.slot.quarantined)


async def test_stuck_engine_is_quarantined_and_comes_back_by_itself(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path, timeout_s=0.2) as it:
        await get_stuck(it, fake)
        assert not it.slot.leasable
        it.engine.unstall()
        await it.until(lambda: not it.slot.quarantined and not it.slot.loading)
        assert await it.engine.ready()


async def test_stuck_engine_that_was_started_anew_waits_for_the_next_plan_in_service(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loading(fake, tmp_path, timeout_s=0.2) as it:
        await get_stuck(it, fake)
        # The others have got the weights meanwhile, and there are no files.
        await fake.publish(1, 1, broadcast_manifest())
        assert await it.watcher.changes.until(lambda: it.watcher.latest.only_broadcast, 10)  # type: ignore[union-attr]
        # As the guard does.
        it.slot.move(Event.LOST)
        await it.until(lambda: it.slot.awaits_plan)
        await time_passes(0.3)
        assert it.slot.quarantined
        it.engine.unstall()
        await it.engine.die()
        await it.engine.revive()
        await it.slot.refresh()
        answers, failures = it.engine.loaded_version, [EngineUnavailable("simulated://0", "starting", "not yet")]

        async def not_at_once() -> str:
            if failures:
                raise failures.pop()
            return await answers()

        monkeypatch.setattr(it.engine, "loaded_version", not_at_once)
        it.slot.move(Event.BACK)
        await it.until(lambda: not it.slot.quarantined)
        assert (failures, it.state, it.slot.leasable) == ([], "LOADING", False)
        await fake.announce(plan(2, PREPARE, membership=2))
        await fake.until(lambda: fake.engine().prepared.version == 2)


async def test_cancelled_member_leaves_its_engine_running(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await prepared(it)
    assert it.engine.calls[2:] == ["leave g1", "resume"]
    assert await it.engine.ready()


async def test_cancelled_member_leaves_unpublished_weights_paused(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await received(it)
    assert it.engine.calls[3:] == ["leave g1"]
    assert not await it.engine.ready()
    assert (it.slot.loaded, it.slot.current) == (BASE, False), "nobody has published what it received"
