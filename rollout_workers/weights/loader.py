"""Brings one engine to the published weights, in flight: fetch and verify → pause → load → verify → go on.

Invariants: an engine generates only under weights that it confirms by name; always the newest published version is
taken up, so superseded ones are skipped; a failure keeps the old weights serving where the engine says that they are
whole. After `reload_timeout_s` of failures the engine is quarantined, and rejoins by the next success.
"""

import asyncio
import contextlib
import time
from pathlib import Path

import structlog

from buffer_wire.retry import Backoff
from rollout_workers.engine.errors import EngineError, EngineLoadFailed, EngineTimeout, EngineUnavailable
from rollout_workers.engine.types import PauseMode
from rollout_workers.errors import WeightsInvalid, WeightsUnavailable
from rollout_workers.slot import EngineSlot
from rollout_workers.versions import Version
from rollout_workers.weights.fetcher import WeightFetcher
from rollout_workers.weights.watcher import Published, WeightWatcher

_BACKOFF = Backoff(first_s=0.2, ceiling_s=5.0)
_RESUME_S = 10.0
_LOST_S = 30.0
_log = structlog.get_logger()


class WeightLoader:
    """Loads for one engine."""

    def __init__(
        self,
        slot: EngineSlot,
        watcher: WeightWatcher,
        fetcher: WeightFetcher,
        *,
        pause_mode: PauseMode,
        timeout_s: float,
        weightless: bool = False,
    ) -> None:
        self._slot = slot
        self._watcher = watcher
        self._fetcher = fetcher
        self._pause_mode = pause_mode
        self._timeout_s = timeout_s
        self._weightless = weightless
        """True for engines that take a version by its name alone (simulated ones)."""

    async def run(self) -> None:
        """Load whatever is published, until cancelled."""
        while True:
            await self._until_behind()
            await self._catch_up()

    def _is_behind(self) -> bool:
        latest = self._watcher.latest
        return latest is not None and not (self._slot.current and self._slot.loaded == latest.version)

    async def _until_behind(self) -> None:
        # Two sources wake it: the watcher, and a slot that was connected anew.
        while not self._is_behind():
            async with asyncio.TaskGroup() as group:
                waits = [
                    group.create_task(changes.until(self._is_behind, timeout_s=60.0))
                    for changes in (self._watcher.changes, self._slot.changes)
                ]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()

    async def _catch_up(self) -> None:
        """Load the newest version, however long it takes."""
        began, delays = time.monotonic(), _BACKOFF.delays()
        while self._is_behind():
            target = self._watcher.latest
            if target is None:
                return
            if not self._slot.reachable:
                # The guard's business, and no failure to load.
                await self._slot.changes.until(lambda: self._slot.reachable, timeout_s=_LOST_S)
                began = time.monotonic()
                continue
            try:
                await self._bring_to(target)
            except (WeightsInvalid, WeightsUnavailable, EngineError) as error:
                self._slot.failed(error, suspect=isinstance(error, EngineUnavailable | EngineTimeout))
                _log.warning("load failed", engine=self._slot.engine_id, version=target.version.label, error=str(error))
                if time.monotonic() - began > self._timeout_s:
                    await self._quarantine()
                await asyncio.sleep(next(delays))

    async def _bring_to(self, target: Published) -> None:
        slot, label = self._slot, target.version.label
        path = await self._path_of(target)
        if path is None:
            self._adopt(target.version)
            return
        began = time.monotonic()
        slot.loading = True
        slot.changes.notify()
        try:
            await self._swap(path, label)
        finally:
            slot.loading = slot.broken
            slot.changes.notify()
        slot.reloads += 1
        slot.last_reload_ms = round((time.monotonic() - began) * 1000)
        slot.pristine = False
        if target.files is not None:
            self._fetcher.hold(slot.engine_id, path)
        self._adopt(target.version)
        _log.info("loaded", engine=slot.engine_id, version=label, reload_ms=slot.last_reload_ms)

    def _adopt(self, version: Version) -> None:
        slot = self._slot
        if slot.quarantined:
            _log.info("engine rejoins", engine=slot.engine_id, version=version.label)
        slot.loaded, slot.current, slot.quarantined = version, True, False
        slot.changes.notify()

    async def _path_of(self, target: Published) -> Path | None:
        """What the engine is to load; None when it holds the version already."""
        slot, version = self._slot, target.version
        if target.files is not None:
            return await self._fetcher.fetch(version, target.files, deadline_s=self._timeout_s)
        if version.version == 0 and slot.pristine:
            return None
        if self._weightless:
            return Path()
        if version.version == 0:
            if slot.base_model is not None:
                return Path(slot.base_model)
            why = f"the engine holds {slot.loaded}; name the base model, or restart the engine"
        elif await slot.engine.loaded_version() == version.label:
            return None
        else:
            why = f"the engine reports {slot.loaded}; waits on whoever writes its weights"
        raise WeightsUnavailable(version.label, "a version published without files", why)

    async def _swap(self, path: Path, label: str) -> None:
        """Pause, load, verify, go on. Leaves the engine paused only while its weights cannot be trusted."""
        engine = self._slot.engine
        trusted = not self._slot.broken
        try:
            await engine.pause(self._pause_mode)
            try:
                await engine.load_files(path, label)
                reported = await engine.loaded_version()
            except EngineLoadFailed as error:
                trusted = trusted and error.weights == "kept"
                raise
            except EngineError:
                trusted = False
                raise
            if reported != label:
                trusted = False
                cause = f"the engine reports {reported!r} after it"
                raise EngineLoadFailed(self._slot.info.address, str(path), label, cause=cause, weights="unknown")
            trusted = True
        finally:
            # Also when cancelled: an engine that outlives this worker must not stay paused.
            self._slot.broken = not trusted
            if trusted:
                with contextlib.suppress(EngineError, TimeoutError):
                    async with asyncio.timeout(_RESUME_S):
                        await engine.resume()

    async def _quarantine(self) -> None:
        slot = self._slot
        if slot.quarantined:
            return
        slot.quarantined = True
        slot.changes.notify()
        _log.error("engine quarantined", engine=slot.engine_id, error=slot.last_error)
        if slot.broken:
            # Its requests wait on a resume that may never come: let them come back.
            with contextlib.suppress(EngineError):
                await slot.engine.pause(PauseMode.ABORT)
