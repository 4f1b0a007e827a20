"""One loader with its engine, watcher and reporter against a fake service."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollout_buffer.v1 import weights_pb2
from rollout_workers.engine.simulated.engine import SimulatedEngine, SimulatedEngineOptions
from rollout_workers.engine.types import PauseMode, ProcessGroup, TensorSpec
from rollout_workers.fleet.reporter import Reporter
from rollout_workers.service.client import ServiceClient
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.versions import Version
from rollout_workers.weights.fetching.fetcher import WeightFetcher
from rollout_workers.weights.loader import WeightLoader
from rollout_workers.weights.permits import Permits
from rollout_workers.weights.watcher import WeightWatcher
from tests.workers.building import weight_files
from tests.workers.fake_service import FakeService


class RecordingEngine(SimulatedEngine):
    """Notes the calls that change it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(SimulatedEngineOptions(**{"load_s": 0.001, **options}))
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
        await self._may_mix(super().load_files(path, version_label))

    async def load_tensors(self, path: Path, version_label: str) -> None:
        self.calls.append(f"hand over {version_label}")
        await self._may_mix(super().load_tensors(path, version_label))

    async def load_adapter(self, path: Path, version_label: str) -> None:
        self.calls.append(f"adapter {version_label}")
        await super().load_adapter(path, version_label)

    async def drop_adapter(self) -> None:
        if self._weights.adapter:
            self.calls.append("no adapter")
        await super().drop_adapter()

    async def join_group(self, process_group: ProcessGroup, *, deadline_s: float) -> None:
        self.calls.append(f"join {process_group.group_name} {process_group.rank}/{process_group.world_size}")
        await super().join_group(process_group, deadline_s=deadline_s)

    async def leave_group(self, group_name: str) -> None:
        self.calls.append(f"leave {group_name}")
        await super().leave_group(group_name)

    async def receive(self, tensors: Sequence[TensorSpec], *, buckets: Sequence[int] = (), **how: Any) -> None:
        in_buckets = f" in buckets of {list(buckets)}" if buckets else ""
        self.calls.append(f"receive {how['version_label']} {[tensor.name for tensor in tensors]}{in_buckets}")
        await self._may_mix(super().receive(tensors, **how))

    async def _may_mix(self, loading: Any) -> None:
        try:
            await loading
        except Exception as error:
            if self.weights_unknown:
                error.weights = "unknown"  # type: ignore[attr-defined]
            raise


class Loading:
    """View that a test has of it."""

    def __init__(
        self,
        fake: FakeService,
        tmp_path: Path,
        engine: RecordingEngine,
        slot: EngineSlot,
        watcher: WeightWatcher,
        fetcher: WeightFetcher,
        permits: Permits,
    ) -> None:
        self.fake = fake
        self.tmp_path = tmp_path
        self.engine = engine
        self.slot = slot
        self.watcher = watcher
        self.fetcher = fetcher
        self.permits = permits

    def files(self, term: int, version: int) -> weights_pb2.FilesManifest:
        return weight_files(self.tmp_path / f"published-{term}.{version}", {"model": b"%d.%d" % (term, version)})

    async def publish(self, term: int, version: int) -> None:
        await self.fake.publish(term, version, weights_pb2.WeightManifest(files=self.files(term, version)))

    async def publish_adapter(self, term: int, version: int) -> None:
        adapter = weights_pb2.AdapterManifest(files=self.files(term, version))
        await self.fake.publish(term, version, weights_pb2.WeightManifest(adapter=adapter))

    async def until(self, holds: Any) -> None:
        """Wait for a change of the slot."""
        assert await self.slot.changes.until(holds, 10), self.engine.calls

    async def until_loaded(self, term: int, version: int) -> None:
        target = Version(term, version)
        await self.until(lambda: self.slot.current and self.slot.loaded == target)
        await self.until(lambda: not self.slot.loading)

    @property
    def state(self) -> str:
        return weights_pb2.EngineState.Name(self.slot.state).removeprefix("ENGINE_STATE_")


@asynccontextmanager
async def loading(
    fake: FakeService,
    tmp_path: Path,
    *,
    engine_id: str = "w.e0",
    base_model: str | None = "/base",
    timeout_s: float = 5.0,
    pause_mode: PauseMode = PauseMode.RETRACT,
    **engine_options: Any,
) -> AsyncIterator[Loading]:
    service = ServiceClient(fake.address, "r", instance_id="i", timeout_s=20)
    engine = RecordingEngine(**engine_options)
    slot = EngineSlot(engine_id, engine, await engine.info(), base_model=base_model)
    await slot.refresh()
    watcher = WeightWatcher(service)
    fetcher = WeightFetcher(tmp_path / f"weights-{engine_id}", owner="w", keep=2)
    permits = Permits(slot, watcher)
    loader = WeightLoader(slot, watcher, fetcher, permits, pause_mode=pause_mode, timeout_s=timeout_s)
    reporter = Reporter(slot, service, watcher, permits, "w")
    parts = [asyncio.create_task(part.run()) for part in (watcher, loader, reporter)]
    try:
        async with asyncio.timeout(30):
            yield Loading(fake, tmp_path, engine, slot, watcher, fetcher, permits)
    finally:
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)
        await fetcher.close()
        await service.close()
