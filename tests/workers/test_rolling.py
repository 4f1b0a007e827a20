"""Loads that wait for their turn: places among the engines out of service, and holds."""

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from rollout_buffer.v1 import weights_pb2
from tests.workers.building import eventually, time_passes
from tests.workers.fake_service import FakeService
from tests.workers.loading import Loading, loading
from tests.workers.planning import PREPARE, plan


class Hold:
    """Active until it is let go."""

    def __init__(self, *, active: bool = True) -> None:
        self._free = asyncio.Event()
        self.asked = asyncio.Event()
        if not active:
            self._free.set()

    @property
    def active(self) -> bool:
        return not self._free.is_set()

    def let_go(self) -> None:
        self._free.set()

    def take(self) -> None:
        self._free.clear()

    async def released(self) -> None:
        self.asked.set()
        await self._free.wait()


def is_fetched(tmp_path: Path, version: int) -> bool:
    return any((tmp_path / "weights-w.e0").glob(f"1.{version}-*"))


def loads(it: Loading) -> list[str]:
    return [call for call in it.engine.calls if call.startswith(("load", "hand over"))]


async def test_no_more_engines_than_allowed_are_out_of_service_at_once(fake: FakeService, tmp_path: Path) -> None:
    fake.max_unavailable = 1
    out_of_service: list[int] = []

    async with AsyncExitStack() as stack:
        its = [
            await stack.enter_async_context(loading(fake, tmp_path, engine_id=f"w.e{i}", load_s=0.02)) for i in range(4)
        ]
        for it in its:
            await it.until_loaded(1, 0)
        await its[0].publish(1, 1)

        async def watch() -> None:
            while True:
                out_of_service.append(sum(it.slot.loading for it in its))
                await its[0].slot.changes.until(lambda: False, timeout_s=0.002)

        watching = asyncio.create_task(watch())
        for it in its:
            await it.until_loaded(1, 1)
        watching.cancel()
        assert max(out_of_service) == 1
        await fake.until(lambda: not fake.permits)


async def test_engine_without_a_place_serves_on_and_fetches_meanwhile(fake: FakeService, tmp_path: Path) -> None:
    fake.max_unavailable = 1
    fake.permits.add("somebody")
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        await it.publish(1, 1)
        await fake.until(lambda: it.permits.wanted)
        assert (it.engine.calls, it.slot.leasable, it.state) == ([], True, "READY")
        assert [path.name.partition("-")[0] for path in (tmp_path / "weights-w.e0").glob("[0-9]*")] == ["1.1"]
        fake.permits.clear()
        await it.until_loaded(1, 1)


async def test_version_that_is_superseded_while_it_waits_is_skipped(fake: FakeService, tmp_path: Path) -> None:
    fake.max_unavailable = 1
    fake.permits.add("somebody")
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        await it.publish(1, 1)
        await it.until(lambda: it.permits.wanted)
        await it.publish(1, 2)
        fake.permits.clear()
        await it.until_loaded(1, 2)
        assert loads(it) == ["load 1.2"]


async def test_newer_version_does_not_cost_the_turn(fake: FakeService, tmp_path: Path) -> None:
    fake.max_unavailable = 1
    fake.permits.add("somebody")
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        await it.publish(1, 1)
        await it.until(lambda: it.permits.wanted)
        gave_up = asyncio.create_task(it.slot.changes.until(lambda: not it.permits.wanted, 10))
        for version in (2, 3):
            await it.publish(1, version)
            await eventually(partial(is_fetched, tmp_path, version))
        assert not gave_up.done()
        fake.permits.clear()
        await it.until_loaded(1, 3)
        assert loads(it) == ["load 1.3"]
        assert await gave_up


async def test_failed_load_gives_the_place_back(fake: FakeService, tmp_path: Path) -> None:
    fake.max_unavailable = 1
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        it.engine.fail_next_loads(1)
        await it.publish(1, 1)
        await it.until(lambda: it.slot.errors == 1)
        await fake.until(lambda: not fake.permits)
        await it.until_loaded(1, 1)


async def test_engine_that_serves_nothing_needs_no_place(fake: FakeService, tmp_path: Path) -> None:
    fake.max_unavailable = 1
    fake.permits.add("somebody")
    await fake.publish(1, 1, weights_pb2.WeightManifest())
    async with loading(fake, tmp_path) as it:
        await it.publish(1, 2)
        await it.until_loaded(1, 2)


async def test_hold_keeps_the_weights_until_it_is_released(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        hold = it.slot.hold = Hold()
        await it.publish(1, 1)
        await hold.asked.wait()
        await time_passes(0.05)
        assert (it.engine.calls, it.permits.wanted) == ([], False)
        hold.let_go()
        await it.until_loaded(1, 1)


async def test_hold_that_begins_while_a_place_is_awaited_goes_first(fake: FakeService, tmp_path: Path) -> None:
    fake.max_unavailable = 1
    fake.permits.add("somebody")
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        hold = it.slot.hold = Hold(active=False)
        await it.publish(1, 1)
        await it.until(lambda: it.permits.wanted)
        hold.take()
        fake.permits.clear()
        await it.until(lambda: not it.permits.wanted)
        assert it.engine.calls == []
        hold.let_go()
        await it.until_loaded(1, 1)


async def test_hold_goes_before_a_collective_update(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        hold = it.slot.hold = Hold()
        await fake.announce(plan(1, PREPARE))
        await hold.asked.wait()
        assert it.engine.calls == []
        hold.let_go()
        await fake.until(lambda: fake.engine().prepared.version == 1)


async def test_collective_update_goes_before_a_load_that_has_no_place_yet(fake: FakeService, tmp_path: Path) -> None:
    fake.max_unavailable = 1
    fake.permits.add("somebody")
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        await it.publish(1, 1)
        await it.until(lambda: it.permits.wanted)
        await fake.announce(plan(2, PREPARE))
        await fake.until(lambda: fake.engine().prepared.version == 2)
        assert loads(it) == []


async def test_tensors_are_handed_over_by_value(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        manifest = weights_pb2.TensorsManifest(files=it.files(1, 1))
        await fake.publish(1, 1, weights_pb2.WeightManifest(tensors=manifest))
        await it.until_loaded(1, 1)
        assert it.engine.calls == ["pause retract", "hand over 1.1", "resume"]


async def test_older_weights_under_a_new_version_are_loaded(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.publish(1, 1)
        await it.until_loaded(1, 1)
        await it.publish(1, 2)
        await it.until_loaded(1, 2)
        await fake.publish(1, 3, weights_pb2.WeightManifest(files=it.files(1, 1)))
        await it.until_loaded(1, 3)
        assert loads(it) == ["load 1.1", "load 1.2", "load 1.3"]
        (place,) = (tmp_path / "weights-w.e0").glob("1.3-*")
        assert (place / "model").read_bytes() == b"1.1"
