"""Traces of the service: its answers to calls that carry a context, and the time of each group in the queue.

The queue's spans are made by the pull that takes the groups. When a group was handed over its payload's key tells, so
nothing is kept for them. They need no context either: each group's trace follows from its id.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import grpc.aio
import structlog

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.ports import RunStore
from buffer_wire.errors import RolloutBufferError
from buffer_wire.payloads.keys import made_ms
from buffer_wire.tracing.contexts import TRACEPARENT, Context, RunTraces, Span
from buffer_wire.tracing.process import tracer

if TYPE_CHECKING:
    from buffer_wire.tracing.sdk import Tracer

log = structlog.get_logger(__name__)

KNOWN_S = 60.0
"""Time, in seconds, for which a run is believed to be the one that it was: it may be deleted and made anew."""
MAX_KNOWN = 1_024
"""Largest number of runs that are remembered."""
_AT_ONCE = 32
"""Spans that are recorded before other work has its turn."""


@dataclass(frozen=True, slots=True)
class TracedCall:
    """Call that carries a context, from its beginning."""

    tracer: "Tracer"
    method: str
    caller: Context
    began_ns: int

    def ended(self, code: str) -> None:
        """Record the call, which ended with `code`; a wait that brought nothing is none worth a span."""
        if code == "DEADLINE_EXCEEDED":
            return
        self.tracer.record(
            Span(
                name=self.method,
                parent=self.caller,
                began_ns=self.began_ns,
                ended_ns=time.time_ns(),
                facts={"rpc.system": "grpc", "rpc.method": self.method, "rpc.grpc.status_code": code},
                serves=True,
                error="" if code in {"OK", "CANCELLED"} else code,
            )
        )


@dataclass(slots=True)
class ServiceTraces:
    """Traces of one rpc process, where tracing is on."""

    tracer: "Tracer"
    store: RunStore
    _known: dict[str, tuple[RunTraces, float]] = field(default_factory=dict)
    """Traces of runs, and until when they are believed, on the monotonic clock."""

    @classmethod
    def of_process(cls, store: RunStore) -> Self | None:
        """Traces of this process; None where tracing is off."""
        traced = tracer()
        return cls(traced, store) if traced is not None else None

    def call(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> TracedCall | None:
        """Begin the span of a call; None where its metadata has no context that is sampled."""
        for key, value in context.invocation_metadata() or ():
            if key == TRACEPARENT:
                caller = Context.parse(str(value))
                return TracedCall(self.tracer, method, caller, time.time_ns()) if caller is not None else None
        return None

    async def pulled(self, run_id: str, batch: ops.Batch, assembled_ns: int) -> None:
        """Record the time in the queue of the groups of a shard that was sent."""
        try:
            run = await self._run(run_id)
        except RolloutBufferError as error:
            log.debug("no spans of a batch", run=run_id, step=batch.step, why=str(error))
            return
        recorded = 0
        for group in batch.shard:
            root = self.tracer.root(run, group.group_id)
            if root is None:
                continue
            since_ms = made_ms(group.payload_key)
            self.tracer.record(
                Span(
                    name="queue",
                    context=root.child(f"queue {batch.step}"),
                    parent=root,
                    began_ns=assembled_ns if since_ms is None else min(assembled_ns, 1_000_000 * since_ms),
                    ended_ns=assembled_ns,
                    facts={
                        "run": run_id,
                        "group": group.group_id,
                        "step": batch.step,
                        "micro_batch": batch.micro_batch,
                        "train_version": batch.train_version,
                        "staleness": max(0, batch.train_version - group.head_version),
                        "replayed": batch.replayed,
                        "queued_groups": batch.queued,
                    },
                )
            )
            recorded += 1
            if recorded % _AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _run(self, run_id: str) -> RunTraces:
        known = self._known.get(run_id)
        if known is not None and time.monotonic() < known[1]:
            return known[0]
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        view = await self.store.call(commands.view(run_id))
        traces = RunTraces(run_id, view.created_ms)
        self._known[run_id] = (traces, time.monotonic() + KNOWN_S)
        return traces
