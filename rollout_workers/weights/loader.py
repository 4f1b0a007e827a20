"""Brings one engine to the published weights, in flight: fetch and verify → ask for a permit → swap; or by broadcast.

Invariants: an engine generates only under weights that it confirms by name; always the newest published version is
taken up, so superseded ones are skipped, as long as fetches keep pace with publishes; a failure keeps the old weights
serving where the engine says that they are whole. After `reload_timeout_s` of failures the engine is quarantined, and
rejoins by the next success, or when it answers and there is nothing left to load. One task an engine does all of it, so
that loads and collective updates never meet.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import structlog

from buffer_wire.connection.retry import Backoff
from rollout_buffer.v1 import weights_pb2
from rollout_workers.changes import until_any
from rollout_workers.engine.errors import EngineError, EngineTimeout, EngineUnavailable
from rollout_workers.engine.types import PauseMode
from rollout_workers.errors import WeightsInvalid, WeightsUnavailable
from rollout_workers.slots.engine_state import Event
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.tracing.run import WorkerTraces
from rollout_workers.versions import Version
from rollout_workers.weights.collective import PlanFollower
from rollout_workers.weights.fetching.fetcher import WeightFetcher
from rollout_workers.weights.permits import Permits
from rollout_workers.weights.swap import swap
from rollout_workers.weights.watcher import Published, WeightWatcher

_BACKOFF = Backoff(first_s=0.2, ceiling_s=5.0)
_LOST_S = 30.0
_POLL_S = 60.0
_FETCH_IN_LINE_S = 10.0
_log = structlog.get_logger()


class WeightLoader:
    """Loads for one engine."""

    def __init__(
        self,
        slot: EngineSlot,
        watcher: WeightWatcher,
        fetcher: WeightFetcher,
        permits: Permits,
        *,
        pause_mode: PauseMode,
        timeout_s: float,
        weightless: bool = False,
        traces: WorkerTraces | None = None,
    ) -> None:
        self._slot = slot
        self._watcher = watcher
        self._fetcher = fetcher
        self._permits = permits
        self._pause_mode = pause_mode
        self._timeout_s = timeout_s
        self._weightless = weightless
        """True for engines that take a version by its name alone (simulated ones)."""
        self._traces = traces
        self._follower = PlanFollower(
            slot, watcher, pause_mode=pause_mode, stuck_s=timeout_s, quarantine=self._quarantine, traces=traces
        )
        self._failures = 0
        """Failed loads in a row, since the last that succeeded."""
        self._delays = _BACKOFF.delays()
        self._due_at = 0.0
        """Deadline of the load that is under way, on the monotonic clock."""
        self._outpaced = False
        """True when the last fetch took longer than publishes, or turns, are apart. Then what is fetched is loaded
        although something newer is out: the newest would never be there in time."""

    async def run(self) -> None:
        """Load whatever is published, and follow what is planned, until cancelled."""
        while True:
            await self._until(lambda: self._wait_has_changed() or self._has_work())
            self._note_wait()
            plan = self._follower.due()
            if plan is not None:
                await self._follower.follow(plan)
            elif self._is_behind():
                await self._catch_up()
            elif self._may_rejoin():
                await self._rejoin()

    # --- what there is to do ----------------------------------------------------------------------------------

    def _has_work(self) -> bool:
        return self._plan_is_due() or self._is_behind() or self._may_rejoin()

    def _plan_is_due(self) -> bool:
        return self._follower.due() is not None

    def _lags(self) -> bool:
        latest, slot = self._watcher.latest, self._slot
        return latest is not None and not (slot.current and slot.loaded == latest.version and not slot.broken)

    def _is_behind(self) -> bool:
        """True when there is something newer that this engine can load."""
        latest = self._watcher.latest
        return self._lags() and latest is not None and not latest.only_broadcast

    def _awaits_plan(self) -> bool:
        """True when the published weights were broadcast, without this engine and without files."""
        latest = self._watcher.latest
        return self._lags() and latest is not None and latest.only_broadcast

    def _may_rejoin(self) -> bool:
        """True when the engine is quarantined, and there is no load whose success could end that."""
        slot = self._slot
        return slot.quarantined and slot.reachable and self._watcher.latest is not None and not self._is_behind()

    def _wait_has_changed(self) -> bool:
        return self._slot.awaits_plan != self._awaits_plan()

    def _is_overtaken(self, target: Published) -> bool:
        return self._watcher.latest != target or self._plan_is_due() or not self._slot.reachable

    def _gives_way(self, target: Published) -> bool:
        """True when `target`, which is fetched, is not to be loaded any more."""
        latest, slot = self._watcher.latest, self._slot
        if latest is None or self._plan_is_due() or not slot.reachable:
            return True
        on_the_way = target.version < latest.version and target.version.term == latest.version.term
        gets_on = not slot.current or slot.loaded < target.version
        return latest != target and not (self._outpaced and on_the_way and gets_on)

    async def _until(self, holds: Callable[[], bool], timeout_s: float = _POLL_S) -> bool:
        """Wait for a change of the published weights, of the plan or of the slot; at most `timeout_s`."""
        return await until_any(holds, self._watcher.changes, self._slot.changes, timeout_s=timeout_s)

    def _note_wait(self) -> None:
        """Say, once, that nothing but a collective update brings this engine forward."""
        slot, latest = self._slot, self._watcher.latest
        if not self._wait_has_changed() or latest is None:
            return
        slot.move(Event.BROADCAST_ONLY if self._awaits_plan() else Event.SUPPLIED)
        if slot.awaits_plan:
            why = f"weights {latest.version} were broadcast without this engine and come without files"
            _log.info("behind", engine=slot.engine_id, loaded=slot.loaded.label, why=why)
            if not slot.current:
                slot.last_error = f"{why}; waits for the next collective update"
        slot.changes.notify()

    async def _rejoin(self) -> None:
        """End the quarantine as soon as the engine answers: it has what is published, or waits for the next plan, whose
        members are engines that are not quarantined.
        """
        slot, delays = self._slot, _BACKOFF.delays()
        while self._may_rejoin():
            try:
                await slot.engine.loaded_version()
            except EngineError as error:
                slot.failed(error, suspect=isinstance(error, EngineUnavailable | EngineTimeout))
                await self._until(lambda: not self._may_rejoin(), next(delays))
            else:
                self._end_quarantine(slot.loaded)

    # --- from files -------------------------------------------------------------------------------------------

    async def _catch_up(self) -> None:
        """Load the newest version, however long it takes, unless a plan comes first."""
        slot = self._slot
        self._begin_anew()
        while self._is_behind() and not self._plan_is_due():
            target = self._watcher.latest
            if target is None:
                return
            if not slot.reachable:
                # The guard's business, and no failure to load.
                await slot.changes.until(lambda: slot.reachable, timeout_s=_LOST_S)
                self._due_at = time.monotonic() + self._timeout_s
                continue
            began_ns = time.time_ns()
            try:
                await self._bring_to(target)
            except (WeightsInvalid, WeightsUnavailable, EngineError) as error:
                slot.failed(error, suspect=isinstance(error, EngineUnavailable | EngineTimeout))
                _log.warning("load failed", engine=slot.engine_id, version=target.version.label, error=str(error))
                self._failures += 1
                self._traced(target.version, began_ns, error=str(error))
                self._permits.leave()
                with self._on_the_clock(target.version.label):  # The deadline does not wait for the next attempt.
                    await self._until(partial(self._is_overtaken, target), next(self._delays))
                if slot.quarantined:
                    await self._free_requests()
        self._permits.leave()

    async def _bring_to(self, target: Published) -> None:
        """Make one attempt to load `target`."""
        slot, label, was_in_line = self._slot, target.version.label, self._permits.wanted
        began_ns = time.time_ns()
        with self._on_the_clock(label), self._turn_kept():
            fetched, path = await self._unless_planned(target)
        fetched_ns = time.time_ns() if target.files is not None else 0
        if not fetched:
            return
        if path is None:
            self._adopt(target.version)
            return
        superseded, lost_turn = self._watcher.latest != target, was_in_line and not self._permits.wanted
        was_outpaced, self._outpaced = self._outpaced, superseded or lost_turn
        if superseded and not was_outpaced:
            return
        if target.is_adapter:
            await self._adapt(target, path)
            self._traced(target.version, began_ns, fetched_ns)
            return
        asked = time.monotonic()
        async with self._permits.load(partial(self._gives_way, target)) as permitted:
            began = time.monotonic()
            self._due_at += began - asked  # That was others' time, whatever came of it.
            if not permitted:
                return
            slot.move(Event.PAUSING)
            try:
                with self._on_the_clock(label):
                    await swap(slot, path, label, pause_mode=self._pause_mode, by_value=target.by_value)
            finally:
                slot.move(Event.RESUMED)
        slot.reloaded(began)
        slot.move(Event.OVERWRITTEN)
        if target.files is not None:
            self._fetcher.hold(slot.engine_id, path)
        self._adopt(target.version)
        self._traced(target.version, began_ns, fetched_ns)
        _log.info("loaded", engine=slot.engine_id, version=label, reload_ms=slot.last_reload_ms)

    async def _adapt(self, target: Published, path: Path) -> None:
        """Have the engine take an adapter, while it generates."""
        slot, label = self._slot, target.version.label
        if not slot.can_adapt:
            why = f"it goes onto the weights that engines start with, and this one holds {slot.loaded}: start it anew"
            raise WeightsUnavailable(label, "an adapter", why)
        if slot.hold is not None:
            asked = time.monotonic()
            with slot.phases.during(weights_pb2.RELOAD_PHASE_WAIT):
                await slot.hold.released()
            self._due_at += time.monotonic() - asked
            if self._gives_way(target):
                return
        began = time.monotonic()
        with self._on_the_clock(label), slot.phases.during(weights_pb2.RELOAD_PHASE_LOAD):
            await slot.engine.load_adapter(path, label)
        slot.reloaded(began)
        slot.move(Event.ADAPTED)
        self._fetcher.hold(slot.engine_id, path)
        self._adopt(target.version)
        _log.info("adapter loaded", engine=slot.engine_id, version=label, load_ms=slot.last_reload_ms)

    def _begin_anew(self) -> None:
        """Begin a load anew, with the whole time for itself: what counts is that the engine gets on, not that it
        catches up.
        """
        self._due_at, self._failures = time.monotonic() + self._timeout_s, 0
        self._delays = _BACKOFF.delays()

    @contextlib.contextmanager
    def _on_the_clock(self, label: str) -> Iterator[None]:
        """Quarantine the engine when its time is over, whatever it is busy with."""

        def too_late() -> None:
            if not (self._slot.quarantined or self._failures):
                self._slot.last_error = f"weights {label} were not loaded within {self._timeout_s:g} s"
            self._quarantine()

        alarm = asyncio.get_running_loop().call_later(max(self._due_at - time.monotonic(), 0.0), too_late)
        try:
            yield
        finally:
            alarm.cancel()

    @contextlib.contextmanager
    def _turn_kept(self) -> Iterator[None]:
        """Keep the engine's turn when newer weights come while it waits for it, if they are fetched quickly.

        Otherwise the turn would never come, where publishes follow each other faster than turns.
        """
        alarm = asyncio.get_running_loop().call_later(_FETCH_IN_LINE_S, self._permits.leave)
        try:
            yield
        finally:
            alarm.cancel()

    async def _unless_planned(self, target: Published) -> tuple[bool, Path | None]:
        """Path that the engine is to load, with True; False when a collective update is announced before the path is
        here.
        """
        fetch = asyncio.create_task(self._path_of(target))
        plan = asyncio.create_task(self._until(self._plan_is_due, self._timeout_s + _POLL_S))
        try:
            await asyncio.wait({fetch, plan}, return_when=asyncio.FIRST_COMPLETED)
            return (True, fetch.result()) if fetch.done() else (False, None)
        finally:
            fetch.cancel()
            plan.cancel()
            await asyncio.gather(fetch, plan, return_exceptions=True)

    async def _path_of(self, target: Published) -> Path | None:
        """Path that the engine is to load; None when it holds the version already."""
        slot, version = self._slot, target.version
        if target.files is not None:
            with slot.phases.during(weights_pb2.RELOAD_PHASE_FETCH):
                path = await self._fetcher.fetch(
                    version,
                    target.files,
                    deadline_s=self._timeout_s,
                    engine_id=slot.engine_id,
                    wanted=lambda: self._watcher.latest == target,
                )
            slot.weights_from = self._fetcher.came_from
            return path
        if version.version == 0 and slot.can_adapt:
            await slot.engine.drop_adapter()
            slot.move(Event.BARE)
            return None
        if self._weightless:
            return Path()
        if version.version == 0:
            if slot.base_model is not None:
                return Path(slot.base_model)
            why = f"the engine holds {slot.loaded}; name the base model, or restart the engine"
        elif slot.broken:
            why = f"the engine may hold a mixture of {slot.loaded} and others; restart it with its worker"
        elif await slot.engine.loaded_version() == version.label:
            slot.move(Event.OVERWRITTEN)  # By somebody else.
            return None
        else:
            why = f"the engine reports {slot.loaded}; waits on whoever writes its weights"
        raise WeightsUnavailable(version.label, "a version published without files", why)

    # --- what comes of it -------------------------------------------------------------------------------------

    def _adopt(self, version: Version) -> None:
        self._end_quarantine(version)
        self._slot.adopt(version)
        self._begin_anew()

    def _traced(self, version: Version, began_ns: int, fetched_ns: int = 0, *, error: str = "") -> None:
        if self._traces is not None:
            self._traces.loaded(self._slot.engine_id, version, began_ns, fetched_ns, error=error)

    def _end_quarantine(self, version: Version) -> None:
        slot = self._slot
        if slot.quarantined:
            _log.info("engine rejoins", engine=slot.engine_id, version=version.label)
        slot.move(Event.REJOINED)

    def _quarantine(self) -> None:
        slot = self._slot
        if slot.quarantined:
            return
        slot.move(Event.QUARANTINED)
        _log.error("engine quarantined", engine=slot.engine_id, error=slot.last_error)

    async def _free_requests(self) -> None:
        if self._slot.broken:
            # Its requests wait on a resume that may never come: let them come back.
            with contextlib.suppress(EngineError):
                await self._slot.engine.pause(PauseMode.ABORT)
