"""Attempts at a group: the one whose push is accepted is the root of its trace, others stand below it."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from buffer_wire.tracing.contexts import RunTraces
from buffer_wire.tracing.sdk import Tracer
from rollout_workers.service.client import ServiceClient
from rollout_workers.tasks.work import Stage
from rollout_workers.tracing.attempt import UNTRACED, trace_of
from rollout_workers.tracing.run import WorkerTraces
from tests.workers.building import lease

RUN = RunTraces("r", 7)


class Slot:
    """Part of an engine's slot that a trace asks for."""

    engine_id = "w.e0"

    class loaded:  # noqa: N801 - a value
        label = "1.3"


class Traced:
    """A worker's traces, and what was recorded."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.traces = WorkerTraces(Tracer("worker", self.exporter), _service(), "w")
        self.traces.run = RUN

    def attempt(self, number: int, *stages: Stage, **told: Any) -> None:
        """Work on a lease: its stages, and how it ended."""

        async def work() -> None:
            trace = trace_of(self.traces, lease(attempt=number), Slot(), 0.5)  # type: ignore[arg-type]
            for stage in stages:
                trace.entered(stage)
            trace.told(**told)
            trace.ended()

        # Each in a task of its own, as the worker's: a context is that of the task which entered it.
        asyncio.run(work())

    def spans(self) -> list[ReadableSpan]:
        self.traces.tracer.close()
        return list(self.exporter.get_finished_spans())


def _service() -> ServiceClient:
    service = ServiceClient.__new__(ServiceClient)
    service.run_id = "r"
    return service


@pytest.fixture
def traced() -> Iterator[Traced]:
    made = Traced()
    yield made
    made.traces.tracer.close()


def test_an_accepted_attempt_is_the_root_of_the_groups_trace(traced: Traced) -> None:
    traced.attempt(1, Stage.PREPARING, Stage.GENERATING, Stage.SCORING, Stage.PUSHING, outcome="queued")
    *stages, rollout = traced.spans()
    root = RUN.group("t1/0")
    assert rollout.context is not None
    assert (rollout.context.trace_id, rollout.context.span_id, rollout.parent) == (root.trace_id, root.span_id, None)
    assert [span.name for span in stages] == ["lease", "prepare", "generate", "reward", "push"]
    assert {span.parent.span_id for span in stages if span.parent} == {root.span_id}
    assert dict(stages[2].attributes or {}) == {"rollout_buffer.engine": "w.e0", "rollout_buffer.version": "1.3"}


def test_an_interrupted_attempt_stands_below_the_one_that_went_on(traced: Traced) -> None:
    traced.attempt(1, Stage.PREPARING, Stage.GENERATING, Stage.RETURNING, settled="returned")
    traced.attempt(2, Stage.PREPARING, Stage.GENERATING, Stage.SCORING, Stage.PUSHING, outcome="queued")
    rollouts = [span for span in traced.spans() if span.name == "rollout"]
    interrupted, went_on = rollouts
    assert interrupted.parent is not None
    assert went_on.context is not None
    assert interrupted.parent.span_id == went_on.context.span_id
    assert went_on.parent is None


def test_a_group_that_sampling_leaves_out_is_untraced(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tracer, "root", lambda _self, _run, _group_id: None)
    assert trace_of(traced.traces, lease(), Slot(), 0.5) is UNTRACED  # type: ignore[arg-type]
    assert trace_of(None, lease(), Slot(), 0.5) is UNTRACED  # type: ignore[arg-type]
