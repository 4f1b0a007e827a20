"""Trace of one lease's work: a span for each of its stages, and one around them, recorded when the work is over.

The attempt whose push the service accepts is the root of the group's trace. Others, which were interrupted, failed or
lost, stand below it. Which one it is shows at the end, so the spans wait until then.
"""

import time
from collections.abc import Callable
from typing import Protocol

from buffer_wire.tracing.contexts import Context, Fact, Span
from rollout_buffer.v1 import tasks_pb2
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.tracing.run import WorkerTraces

ACCEPTED = frozenset({"queued", "recorded", "duplicate", "filtered"})
"""Answers to pushes after which the group, or its account, is the service's."""

_NAMES = {
    "preparing": "prepare",
    "generating": "generate",
    "scoring": "reward",
    "pushing": "push",
    "returning": "return",
}
"""Names of the spans of stages."""


class Trace(Protocol):
    """Trace of one lease's work."""

    def entered(self, stage: str) -> None:
        """Begin a stage; the one before it ends."""
        ...

    def told(self, **facts: Fact) -> None:
        """Add attributes to the span around the stages."""
        ...

    def ended(self) -> None:
        """Record everything."""
        ...


class Untraced:
    """Trace of work that is not recorded."""

    def entered(self, stage: str) -> None:
        """Do nothing."""

    def told(self, **facts: Fact) -> None:
        """Do nothing."""

    def ended(self) -> None:
        """Do nothing."""


UNTRACED = Untraced()


class AttemptTrace:
    """Trace of an attempt at a group. `asked_ns`: when the lease was asked for."""

    def __init__(
        self,
        traces: WorkerTraces,
        root: Context,
        lease: tasks_pb2.Lease,
        slot: EngineSlot,
        asked_ns: int,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._traces, self._root, self._slot, self._clock_ns = traces, root, slot, clock_ns
        self._mine = root.child(f"attempt {lease.attempt}")
        self._began_ns = asked_ns
        self._spans: list[Span] = []
        self._open: tuple[str, Context, int, dict[str, Fact]] | None = None
        self._facts: dict[str, Fact] = {
            "run": traces.service.run_id,
            "task": lease.task.task_id,
            "group": f"{lease.task.task_id}/{lease.incarnation}",
            "attempt": lease.attempt,
            "environment": lease.task.environment or None,
            "worker": traces.worker_id,
            "engine": slot.engine_id,
        }
        self._keep("lease", self._mine.child("lease"), asked_ns, {"engine": slot.engine_id})

    def entered(self, stage: str) -> None:
        """Begin a stage, whose context calls of this task carry from now on; the one before it ends."""
        self._close()
        name = _NAMES.get(stage, stage)
        context = self._mine.child(f"{name} {len(self._spans)}")
        weights = {"engine": self._slot.engine_id, "version": self._slot.loaded.label} if name == "generate" else {}
        self._open = (name, context, self._clock_ns(), dict(weights))
        self._traces.tracer.enter(context)

    def told(self, **facts: Fact) -> None:
        """Add attributes to the span around the stages."""
        self._facts.update(facts)

    def ended(self) -> None:
        """Record the stages and the span around them."""
        self._close()
        is_root = self._facts.get("outcome") in ACCEPTED
        context = self._root if is_root else self._mine
        for span in self._spans:
            self._traces.tracer.record(span.below(context))
        self._traces.tracer.record(
            Span(
                name="rollout",
                context=context,
                parent=None if is_root else self._root,
                began_ns=self._began_ns,
                ended_ns=self._clock_ns(),
                facts=self._facts,
                error=str(self._facts.get("error") or ""),
            )
        )

    def _close(self) -> None:
        if self._open is not None:
            name, context, began_ns, facts = self._open
            self._keep(name, context, began_ns, facts)
            self._open = None

    def _keep(self, name: str, context: Context, began_ns: int, facts: dict[str, Fact]) -> None:
        ended_ns = self._clock_ns()
        self._spans.append(Span(name=name, context=context, began_ns=began_ns, ended_ns=ended_ns, facts=facts))


def trace_of(traces: WorkerTraces | None, lease: tasks_pb2.Lease, slot: EngineSlot, asked_s_ago: float) -> Trace:
    """Trace of the work on a lease that was asked for so many seconds ago."""
    if traces is None:
        return UNTRACED
    root = traces.group(f"{lease.task.task_id}/{lease.incarnation}")
    if root is None:
        return UNTRACED
    return AttemptTrace(traces, root, lease, slot, time.time_ns() - int(1e9 * asked_s_ago))
