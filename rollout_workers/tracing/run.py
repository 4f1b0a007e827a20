"""Traces of a worker's run: which run it is, whose spans are recorded, and the spans of loads.

A run that is deleted and made anew has other traces. So the worker asks now and then which one it is.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from buffer_wire.errors import RolloutBufferError
from buffer_wire.tracing.contexts import Context, RunTraces, Span
from buffer_wire.tracing.process import tracer
from rollout_workers.service.client import ServiceClient
from rollout_workers.versions import Version

if TYPE_CHECKING:
    from buffer_wire.tracing.sdk import Tracer

_AGAIN_S = 60.0
_UNKNOWN_S = 1.0
_FIRST_S = 2.0
"""Longest wait for the first answer, in seconds, before work begins."""


@dataclass(slots=True)
class WorkerTraces:
    """Traces of one worker's run, where tracing is on."""

    tracer: "Tracer"
    service: ServiceClient
    worker_id: str
    run: RunTraces | None = field(default=None, init=False)
    """None until the service has said which run it is."""

    @classmethod
    def of_process(cls, service: ServiceClient, worker_id: str) -> Self | None:
        """Traces of this process; None where tracing is off."""
        traced = tracer()
        return cls(traced, service, worker_id) if traced is not None else None

    async def begin(self) -> None:
        """Ask which run it is, before the work begins; who is not answered soon goes on untraced for now."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_S):
                await self._ask()

    async def follow(self) -> None:
        """Keep up with which run it is, until cancelled."""
        while True:
            await asyncio.sleep(_AGAIN_S if self.run is not None else _UNKNOWN_S)
            await self._ask()

    async def _ask(self) -> None:
        with contextlib.suppress(RolloutBufferError):  # Whoever works for the run says so.
            self.run = RunTraces(self.service.run_id, await self.service.created_ms())

    def group(self, group_id: str) -> Context | None:
        """Root of a group's trace; None where it is not recorded."""
        return self.tracer.root(self.run, group_id) if self.run is not None else None

    def loaded(self, engine_id: str, version: Version, began_ns: int, fetched_ns: int = 0, *, error: str = "") -> None:
        """Record that an engine has loaded a version, or has failed to. `fetched_ns`: when the files were there."""
        if self.run is None:
            return
        root = self.run.update(version.term, version.version)
        load = root.child(f"load {engine_id} {began_ns}")
        facts = {"run": self.run.run_id, "worker": self.worker_id, "engine": engine_id, "version": version.label}
        if fetched_ns:
            self.tracer.record(
                Span(name="fetch", parent=load, began_ns=began_ns, ended_ns=fetched_ns, facts={"engine": engine_id})
            )
        self.tracer.record(
            Span(
                name="load",
                context=load,
                parent=root,
                began_ns=began_ns,
                ended_ns=time.time_ns(),
                facts=facts,
                error=error,
            )
        )
