import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout_buffer.v1 import weights_pb2
from rollout_workers.engine.simulated import SimulatedEngine, SimulatedEngineOptions
from rollout_workers.engine.types import PauseMode
from rollout_workers.service import ServiceClient
from rollout_workers.slot import EngineSlot
from rollout_workers.versions import BASE, Version
from rollout_workers.weights.fetcher import WeightFetcher
from rollout_workers.weights.loader import WeightLoader
from rollout_workers.weights.watcher import WeightWatcher
from tests.workers.building import time_passes, weight_files
from tests.workers.fake_service import FakeService


class RecordingEngine(SimulatedEngine):
    """Notes the calls that change it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(SimulatedEngineOptions(load_s=0.001, **options))
        self.calls: list[str] = []
        self.weights_unknown = False

    async def pause(self, mode: PauseMode) -> None:
        self.calls.append(f"pause {mode}")
        await super().pause(mode)

    async def resume(self) -> None:
        self.calls.append("resume")
        await super().resume()

    async def load_files(self, path: Path, version_label: str) -> None:
        self.calls.append(f"load {version_label}")
        try:
            await super().load_files(path, version_label)
        except Exception as error:
            if self.weights_unknown:
                error.weights = "unknown"  # type: ignore[attr-defined]
            raise


class Loading:
    def __init__(self, fake: FakeService, tmp_path: Path, engine: RecordingEngine, slot: EngineSlot) -> None:
        self.fake = fake
        self.tmp_path = tmp_path
        self.engine = engine
        self.slot = slot

    async def publish(self, epoch: int, version: int) -> None:
        files = weight_files(self.tmp_path / f"published-{epoch}.{version}", {"model": b"%d.%d" % (epoch, version)})
        await self.fake.publish(epoch, version, weights_pb2.WeightManifest(files=files))

    async def until_loaded(self, epoch: int, version: int) -> None:
        target = Version(epoch, version)
        assert await self.slot.changes.until(lambda: self.slot.current and self.slot.loaded == target, 10)
        assert await self.slot.changes.until(lambda: not self.slot.loading, 10)


@asynccontextmanager
async def loading(
    fake: FakeService,
    tmp_path: Path,
    *,
    base_model: str | None = "/base",
    timeout_s: float = 5.0,
    pause_mode: PauseMode = PauseMode.RETRACT,
    **engine_options: Any,
) -> AsyncIterator[Loading]:
    service = ServiceClient(fake.address, "r", instance_id="i", timeout_s=20)
    engine = RecordingEngine(**engine_options)
    slot = EngineSlot("w.e0", engine, await engine.info(), base_model=base_model)
    await slot.refresh()
    watcher = WeightWatcher(service)
    fetcher = WeightFetcher(tmp_path / "weights", owner="w", keep=2)
    loader = WeightLoader(slot, watcher, fetcher, pause_mode=pause_mode, timeout_s=timeout_s)
    parts = [asyncio.create_task(watcher.run()), asyncio.create_task(loader.run())]
    async with asyncio.timeout(30):
        yield Loading(fake, tmp_path, engine, slot)
    for part in parts:
        part.cancel()
    await asyncio.gather(*parts, return_exceptions=True)
    await fetcher.close()
    await service.close()


def state_of(it: Loading) -> str:
    return weights_pb2.EngineState.Name(it.slot.state)


def may_work(it: Loading) -> bool:
    return it.slot.leasable


async def test_engine_at_the_start_of_a_fresh_run_needs_no_load(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        assert it.engine.calls == []
        assert it.slot.leasable


async def test_published_version_is_loaded_between_pause_and_resume(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.publish(1, 1)
        await it.until_loaded(1, 1)
        assert it.engine.calls == ["pause retract", "load 1.1", "resume"]
        assert await it.engine.ready()
        assert (it.slot.reloads, it.slot.errors) == (1, 0)


async def test_files_are_there_before_the_engine_is_paused(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path, timeout_s=1.0) as it:
        await it.until_loaded(1, 0)
        missing = weights_pb2.FilesManifest(base_url=str(tmp_path / "nowhere"))
        missing.files.add(name="model", size_bytes=1, sha256=bytes(32))
        await fake.publish(1, 1, weights_pb2.WeightManifest(files=missing))
        await it.slot.changes.until(lambda: it.slot.errors > 0, 10)
        assert it.engine.calls == []
        assert "cannot be had from" in it.slot.last_error


async def test_superseded_versions_are_skipped(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        it.engine.stall()
        await it.publish(1, 1)
        assert await it.slot.changes.until(lambda: it.slot.loading, 10)
        for version in range(2, 6):
            await it.publish(1, version)
        it.engine.unstall()
        await it.until_loaded(1, 5)
        loads = [call for call in it.engine.calls if call.startswith("load")]
        assert loads[-1] == "load 1.5"
        assert len(loads) <= 2


async def test_lower_version_of_a_new_epoch_is_loaded(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.publish(1, 7)
        await it.until_loaded(1, 7)
        await it.publish(2, 3)
        await it.until_loaded(2, 3)
        assert await it.engine.loaded_version() == "2.3"


async def test_resume_at_version_zero_goes_back_to_the_base_model(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.publish(1, 1)
        await it.until_loaded(1, 1)
        await fake.publish(2, 0)
        await it.until_loaded(2, 0)
        assert it.engine.calls[-3:] == ["pause retract", "load 2.0", "resume"]


async def test_version_zero_without_a_base_model_says_what_to_do(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path, base_model=None, version_label="1.4") as it:
        assert await it.slot.changes.until(lambda: it.slot.errors > 0, 10)
        assert "the engine holds 1.4; name the base model" in it.slot.last_error
        assert not it.slot.leasable


async def test_label_of_somebody_else_is_not_trusted(fake: FakeService, tmp_path: Path) -> None:
    # The engine says 1.1, but of which run?
    async with loading(fake, tmp_path, version_label="1.1") as it:
        assert it.slot.loaded == Version(1, 1)
        await it.publish(1, 1)
        await it.until_loaded(1, 1)
        assert it.engine.calls == ["pause retract", "load 1.1", "resume"]


async def test_version_without_files_waits_for_whoever_writes_the_weights(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await fake.publish(1, 1)
        assert await it.slot.changes.until(lambda: it.slot.errors > 0, 10)
        assert "waits on whoever writes its weights" in it.slot.last_error
        it.engine._label = "1.1"
        await it.until_loaded(1, 1)
        assert it.engine.calls == []


async def test_failed_load_keeps_the_old_weights_serving_and_is_repeated(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        it.engine.fail_next_loads(1)
        await it.publish(1, 1)
        assert await it.slot.changes.until(lambda: it.slot.errors == 1 and not it.slot.loading, 10)
        assert it.engine.calls == ["pause retract", "load 1.1", "resume"]
        assert it.slot.leasable
        assert it.slot.loaded == BASE
        await it.until_loaded(1, 1)


async def test_engine_that_cannot_be_trusted_stays_paused(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        it.engine.weights_unknown = True
        it.engine.fail_next_loads(1)
        await it.publish(1, 1)
        assert await it.slot.changes.until(lambda: it.slot.errors == 1, 10)
        assert not await it.engine.ready()
        await it.until_loaded(1, 1)
        assert it.engine.calls.count("resume") == 1
        assert await it.engine.ready()


async def test_engine_that_keeps_failing_is_quarantined_and_rejoins_at_the_newest(
    fake: FakeService, tmp_path: Path
) -> None:
    async with loading(fake, tmp_path, timeout_s=0.3) as it:
        it.engine.fail_next_loads(1_000)
        await it.publish(1, 1)
        assert await it.slot.changes.until(lambda: it.slot.quarantined, 10)
        assert state_of(it) == "ENGINE_STATE_QUARANTINED"
        assert not may_work(it)
        await it.publish(1, 2)
        it.engine.fail_next_loads(0)
        await it.until_loaded(1, 2)
        assert may_work(it)
        assert state_of(it) == "ENGINE_STATE_READY"


async def test_wrong_checksum_never_reaches_the_engine(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        files = weight_files(tmp_path / "published", {"model": b"right"})
        (tmp_path / "published" / "model").write_bytes(b"wrong")
        await fake.publish(1, 1, weights_pb2.WeightManifest(files=files))
        assert await it.slot.changes.until(lambda: it.slot.errors > 0, 10)
        assert "model: its SHA-256 is" in it.slot.last_error
        assert it.engine.calls == []
        (tmp_path / "published" / "model").write_bytes(b"right")
        await it.until_loaded(1, 1)


async def test_cancelled_load_does_not_leave_the_engine_paused(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loading(fake, tmp_path, load_timeout_s=30.0) as it:
        await it.until_loaded(1, 0)
        entered = asyncio.Event()

        async def hang(path: Path, label: str) -> None:
            entered.set()
            await asyncio.sleep(60)

        monkeypatch.setattr(it.engine, "load_files", hang)
        await it.publish(1, 1)
        await entered.wait()
    assert it.engine.calls[-1] == "resume"
    assert await it.engine.ready()


async def test_engine_that_is_lost_is_left_to_the_guard(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        it.slot.reachable = False
        await it.publish(1, 1)
        await time_passes(0.3)
        assert it.engine.calls == []
        assert it.slot.errors == 0
        it.slot.reachable = True
        it.slot.changes.notify()
        await it.until_loaded(1, 1)


async def test_watch_goes_on_after_a_restart_of_the_service(fake: FakeService, tmp_path: Path) -> None:
    async with loading(fake, tmp_path) as it:
        await it.until_loaded(1, 0)
        await fake.stop()
        await it.publish(1, 1)
        await fake.start()
        await it.until_loaded(1, 1)
