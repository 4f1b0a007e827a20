"""Takes one engine through a planned collective update: join → pause → receive → wait for the publish → go on.

Invariants: the engine goes on only under weights that are published, or under those it had before; what it received
and nobody published does not count as loaded. A plan that has failed for this engine is not tried again: the trainer
makes a new one without it. However it ends, the engine is not left stuck in a dead process group while it can be
reached.
"""

import asyncio
import contextlib
import enum
import time
from collections.abc import Awaitable, Callable

import structlog

from buffer_wire.connection.retry import Backoff
from rollout_buffer.v1 import weights_pb2
from rollout_workers.changes import until_any
from rollout_workers.engine.errors import EngineError, EngineLoadFailed, EngineTimeout, EngineUnavailable
from rollout_workers.engine.types import PauseMode, ProcessGroup
from rollout_workers.slots.engine_state import Event
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.tracing.run import WorkerTraces
from rollout_workers.versions import Version
from rollout_workers.weights.plans import Phase, Plan
from rollout_workers.weights.watcher import WeightWatcher

SLACK_S = 5.0
"""Slack beyond the plan's own time: the trainer gives up first and closes the group, which ends every member's wait."""
EXPIRY_S = 60.0
"""Time beyond the plan's own for which a member that is ready waits for the trainer's next step."""
_HOLD_S = 3_600.0
_RESUME_S = 10.0
_BACKOFF = Backoff(first_s=0.2, ceiling_s=5.0)
_log = structlog.get_logger()


class PlanState(enum.Enum):
    """State of a plan, as a member sees it."""

    PREPARE = "is being prepared"
    BROADCAST = "is being broadcast"
    PUBLISHED = "was published"
    ABANDONED = "was abandoned"
    REPLACED = "was replaced"
    GONE = "was taken back"
    LOST = "lost this engine"


class PlanFollower:
    """Follows plans for one engine. `stuck_s`: an engine that cannot be freed for so long is quarantined."""

    def __init__(
        self,
        slot: EngineSlot,
        watcher: WeightWatcher,
        *,
        pause_mode: PauseMode,
        stuck_s: float,
        quarantine: Callable[[], None],
        traces: WorkerTraces | None = None,
    ) -> None:
        self._traces = traces
        self._slot = slot
        self._watcher = watcher
        self._pause_mode = pause_mode
        self._stuck_s = stuck_s
        self._quarantine = quarantine
        self._ended: Plan | None = None
        self._joined: ProcessGroup | None = None
        """Process group in which the engine is, or in which a failure may have left it."""

    def due(self) -> Plan | None:
        """The plan that this engine has to follow now."""
        plan, latest, slot = self._watcher.plan, self._watcher.latest, self._slot
        if (
            plan is None
            or latest is None
            or plan.phase is Phase.ABANDONED
            or (self._ended is not None and plan.key == self._ended.key)
        ):
            return None
        takes_part = slot.engine_id in plan.ranks and slot.reachable and not slot.quarantined
        return plan if takes_part and plan.version > latest.version else None

    async def follow(self, plan: Plan) -> None:
        """Take part until the plan has ended, one way or the other. Raises nothing of the engine's."""
        slot = self._slot
        before, trusted = slot.loaded, not slot.broken
        stands, received, began = PlanState.PREPARE, False, time.monotonic()
        try:
            if await self._released(plan):
                await self._prepare(plan)
                began = time.monotonic()
                with slot.phases.during(weights_pb2.RELOAD_PHASE_WAIT):
                    stands = await self._while_in(plan, PlanState.PREPARE)
            else:
                stands = PlanState.ABANDONED
            if stands is PlanState.BROADCAST:
                received, trusted = True, False
                await self._receive(plan)
                stands = await self._while_in(plan, PlanState.BROADCAST)
        except EngineError as error:
            kept = isinstance(error, EngineLoadFailed) and error.weights == "kept"
            if received and kept:
                received, trusted = False, not slot.broken
            slot.failed(error, suspect=isinstance(error, EngineUnavailable | EngineTimeout))
            _log.warning("collective update failed", engine=slot.engine_id, version=str(plan.version), error=str(error))
            stands = PlanState.LOST
        except asyncio.CancelledError:
            if received:
                slot.move(Event.DISOWNED, loaded=before)
            await self._abandon_ship(trusted=trusted)
            raise
        finally:
            self._ended = plan
            slot.move(Event.PLAN_ENDED, prepared=None)
        if stands is PlanState.PUBLISHED and received:
            await self._go_on(plan, began)
        else:
            await self._step_back(plan, stands, before, received=received, trusted=trusted)

    def _state_of(self, plan: Plan) -> PlanState:
        latest, now, slot = self._watcher.latest, self._watcher.plan, self._slot
        if not slot.reachable or slot.prepared != plan.version:
            return PlanState.LOST
        if latest is not None and latest.version >= plan.version:
            same = (latest.version, latest.membership) == plan.key
            return PlanState.PUBLISHED if same else PlanState.REPLACED
        if now is None:
            return PlanState.GONE
        if now.key != plan.key:
            return PlanState.REPLACED
        return {Phase.PREPARE: PlanState.PREPARE, Phase.BROADCAST: PlanState.BROADCAST}.get(
            now.phase, PlanState.ABANDONED
        )

    async def _while_in(self, plan: Plan, here: PlanState) -> PlanState:
        """Wait until the plan stands elsewhere than `here`; with GONE when nothing was heard for too long."""
        slot, limit_s = self._slot, plan.timeout_s + EXPIRY_S
        moved = await until_any(
            lambda: self._state_of(plan) is not here, slot.changes, self._watcher.changes, timeout_s=limit_s
        )
        stands = self._state_of(plan) if moved else PlanState.GONE
        if not moved:
            slot.last_error = f"collective update {plan.version}: no step of the trainer within {limit_s:g} s"
        _log.debug("collective update", engine=slot.engine_id, version=str(plan.version), now=stands.value)
        return stands

    async def _released(self, plan: Plan) -> bool:
        """Wait until nothing holds the weights; False when the plan is over before that."""
        slot, watcher = self._slot, self._watcher
        if slot.hold is None:
            return True

        def is_over() -> bool:
            now = watcher.plan
            return not slot.reachable or now is None or now.key != plan.key or now.phase is Phase.ABANDONED

        released = asyncio.create_task(slot.hold.released())
        over = asyncio.create_task(until_any(is_over, watcher.changes, slot.changes, timeout_s=_HOLD_S))
        try:
            await asyncio.wait({released, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            released.cancel()
            over.cancel()
            await asyncio.gather(released, over, return_exceptions=True)
        return not is_over()

    async def _prepare(self, plan: Plan) -> None:
        slot = self._slot
        if plan.phase is not Phase.PREPARE:
            # This process has not prepared anything: another one of this name did, and is gone.
            self._joined = plan.process_group_of(slot.engine_id)
            raise self._refusal(plan, "this worker was started after the engine had been prepared")
        if plan.buckets and (sum(plan.buckets) != len(plan.tensors) or not slot.info.takes_buckets):
            why = f"{len(plan.tensors)} tensors come in buckets of {sum(plan.buckets)}, which this engine cannot take"
            raise self._refusal(plan, why)
        await slot.engine.check_tensors(plan.tensors)
        process_group = plan.process_group_of(slot.engine_id)
        # The number alone does not tell a group from that of an earlier trainer.
        if (slot.membership, self._joined) != (plan.membership, process_group):
            if plan.established:
                # It was in it, or its last process was: one that meets nobody there is stuck for long.
                self._joined = process_group
                raise self._refusal(plan, "this engine is not in the group that the update is for any more")
            await self._leave_group()
            self._joined = process_group
            with slot.phases.during(weights_pb2.RELOAD_PHASE_JOIN):
                await slot.engine.join_group(process_group, deadline_s=plan.timeout_s + SLACK_S)
            slot.move(Event.JOINED, membership=plan.membership)
        slot.move(Event.PAUSING)
        with slot.phases.during(weights_pb2.RELOAD_PHASE_PAUSE):
            await slot.engine.pause(self._pause_mode)
        slot.move(Event.PREPARED, prepared=plan.version)

    async def _receive(self, plan: Plan) -> None:
        slot = self._slot
        with slot.phases.during(weights_pb2.RELOAD_PHASE_LOAD):
            await slot.engine.receive(
                plan.tensors,
                buckets=plan.buckets,
                group_name=plan.group_name,
                version_label=plan.version.label,
                deadline_s=plan.timeout_s + SLACK_S,
            )
        slot.move(Event.OVERWRITTEN, loaded=plan.version)

    async def _go_on(self, plan: Plan, began: float) -> None:
        slot = self._slot
        slot.move(Event.WHOLE)
        slot.move(Event.REJOINED)
        slot.adopt(plan.version)
        with slot.phases.during(weights_pb2.RELOAD_PHASE_RESUME):
            await self._insist("resuming", slot.engine.resume)
        slot.reloaded(began)
        slot.move(Event.RESUMED)
        if self._traces is not None:
            began_ns = time.time_ns() - int(1e9 * (time.monotonic() - began))
            self._traces.loaded(slot.engine_id, plan.version, began_ns)
        _log.info("received", engine=slot.engine_id, version=plan.version.label, reload_ms=slot.last_reload_ms)

    async def _step_back(
        self, plan: Plan, stands: PlanState, before: Version, *, received: bool, trusted: bool
    ) -> None:
        """Leave the group and go on with the old weights; without them the loader has to find published ones."""
        slot = self._slot
        if not trusted:
            slot.move(Event.SPOILED)
        if received:
            slot.move(Event.DISOWNED, loaded=before)
            slot.last_error = f"received {plan.version}, which {stands.value} and is not published in this form"
        _log.info("collective update ends", engine=slot.engine_id, version=plan.version.label, why=stands.value)
        now = self._watcher.plan
        if not (stands is PlanState.REPLACED and now is not None and now.membership == plan.membership):
            slot.move(Event.LEFT, membership=0)

        async def be_free() -> None:
            if slot.membership == 0:
                await self._leave_group()
            if trusted and slot.loading:
                await slot.engine.resume()

        await self._insist("leaving the process group", be_free)
        slot.move(Event.RESUMED)

    async def _insist(self, doing: str, call: Callable[[], Awaitable[None]]) -> None:
        """Repeat a call until it works: an engine that is stuck in a group answers when the group's other members are
        gone.
        """
        slot, delays, began = self._slot, _BACKOFF.delays(), time.monotonic()
        while slot.reachable:
            try:
                await call()
            except EngineError as error:
                slot.failed(error, suspect=isinstance(error, EngineUnavailable | EngineTimeout))
                _log.warning("engine is stuck", engine=slot.engine_id, doing=doing, error=str(error))
            else:
                break
            if time.monotonic() - began > self._stuck_s:
                self._quarantine()
            await slot.changes.until(lambda: not slot.reachable, timeout_s=next(delays))
        else:
            return
        if slot.quarantined and not slot.broken:
            slot.move(Event.REJOINED)

    async def _leave_group(self) -> None:
        if self._slot.membership:
            self._slot.move(Event.LEFT, membership=0)
        if self._joined is not None:
            await self._slot.engine.leave_group(self._joined.group_name)
            self._joined = None

    async def _abandon_ship(self, *, trusted: bool) -> None:
        """Free the engine when the worker ends: take it out of its group, and resume it if its weights are good."""
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(_RESUME_S):
                await self._leave_group()
                if trusted:
                    await self._slot.engine.resume()

    def _refusal(self, plan: Plan, why: str) -> EngineLoadFailed:
        source = f"process group {plan.group_name}"
        return EngineLoadFailed(self._slot.info.address, source, plan.version.label, cause=why, weights="kept")
