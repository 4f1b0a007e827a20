"""One engine as the worker's parts share it: what it has loaded, whether it may be given work, what it is reported as.

Invariants: `loaded` is what the engine itself last confirmed; an engine gets leases only when it is reachable, was
brought to a published version since it was last connected, and is not quarantined. Written by the loader and the guard,
read by everybody else.
"""

from rollout_buffer.v1 import weights_pb2
from rollout_workers.changes import Changes
from rollout_workers.counters import describe
from rollout_workers.engine.types import Engine, EngineInfo
from rollout_workers.versions import BASE, Version

State = weights_pb2.EngineState


class EngineSlot:
    """State of one engine."""

    def __init__(self, engine_id: str, engine: Engine, info: EngineInfo, *, base_model: str | None) -> None:
        self.engine_id = engine_id
        self.engine = engine
        self.info = info
        self.base_model = base_model
        """What holds version 0, as the engine would load it; None when nobody knows."""
        self.changes = Changes()
        self.loaded: Version = BASE
        self.current = False
        """True once this worker has seen the engine at a published version, until the engine is lost."""
        self.pristine = False
        """True while the engine holds the weights it started with."""
        self.reachable = True
        self.loading = False
        """True from before the pause until after the resume."""
        self.broken = False
        """True while the engine is paused because what it holds cannot be trusted."""
        self.quarantined = False
        self.stopped = False
        self.reloads = 0
        self.last_reload_ms = 0
        self.errors = 0
        self.last_error = ""
        self.suspect = False
        """True from an error that may mean that the engine is gone until the guard has heard from it."""

    @property
    def leasable(self) -> bool:
        """True when the engine may be given new work."""
        unfit = self.suspect or self.quarantined or self.stopped
        return self.reachable and self.current and not unfit

    @property
    def state(self) -> "State.ValueType":
        """As it is reported."""
        if self.stopped:
            return weights_pb2.ENGINE_STATE_STOPPED
        if self.quarantined:
            return weights_pb2.ENGINE_STATE_QUARANTINED
        if self.loading:
            return weights_pb2.ENGINE_STATE_LOADING
        return weights_pb2.ENGINE_STATE_READY if self.leasable else weights_pb2.ENGINE_STATE_STARTING

    def version_of(self, label: str) -> Version:
        """The version of an engine's label; a label that no worker gave means the weights it started with."""
        return Version.parse(label) or BASE

    def failed(self, error: BaseException, *, suspect: bool = False) -> None:
        """Note an error; `suspect` when the engine may be gone."""
        self.errors += 1
        self.last_error = describe(error)
        self.suspect = self.suspect or suspect
        self.changes.notify()

    async def refresh(self) -> None:
        """Ask the engine what it has loaded, after it was connected (anew). Raises EngineError."""
        label = await self.engine.loaded_version()
        known = Version.parse(label)
        self.loaded = known or BASE
        # A label in our form says that somebody updated the engine, not from which run: it is loaded once more.
        self.pristine = known is None
        self.current = False
        self.changes.notify()

    def report(self, worker_id: str) -> weights_pb2.EngineReport:
        """The engine as a message."""
        return weights_pb2.EngineReport(
            engine_id=self.engine_id,
            worker_id=worker_id,
            state=self.state,
            loaded=self.loaded.wire(),
            reloads=self.reloads,
            last_reload_ms=self.last_reload_ms,
            last_error=self.last_error,
            errors=self.errors,
        )
