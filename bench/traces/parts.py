"""Costs of the parts of tracing, each by itself: the least CPU time of many tries, which hardly depends on others.

Whole loops side by side show what comes of it, within the noise of the machine. These show what a hundredth is made of.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from buffer_wire.tracing import process
from buffer_wire.tracing.contexts import Fact, RunTraces, Span
from buffer_wire.tracing.sdk import Tracer
from rollout_workers.tracing.attempt import UNTRACED

TRIES, MANY = 25, 2_000
DECISIONS = {"queue": 1, "loop": 3}
"""Processes that ask of a group whether it is traced, by load."""
SPANS = {"queue": 1, "loop": 8}
"""Spans of a traced group."""


class Encoder(SpanExporter):
    """Exporter up to the bytes that would be sent."""

    def export(self, spans: Any) -> SpanExportResult:  # noqa: ANN401 - as the base's
        """Encode the spans, and no more."""
        encode_spans(spans).SerializePartialToString()
        return SpanExportResult.SUCCESS


def least_us(work: Callable[[], object], per: int) -> float:
    """CPU microseconds of one of the `per` things that `work` does, all threads of the process together."""
    best = float("inf")
    for _ in range(TRIES):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return 1e6 * best / per


def measured() -> dict[str, float]:
    """Microseconds: `decide` whether a group is traced, a `span` from its recording to its bytes, and `off`, what a
    group asks for where tracing is off.
    """
    os.environ["OTEL_BSP_MAX_QUEUE_SIZE"] = str(2 * MANY)
    run = RunTraces("bench", 1_700_000_000_000)
    group_ids = [f"t{number}/0" for number in range(MANY)]
    tracer = Tracer("bench", Encoder())

    def decide() -> None:
        for group_id in group_ids:
            tracer.root(run, group_id)

    def spans() -> None:
        made = Tracer("bench", Encoder())
        for group_id in group_ids:
            root = run.group(group_id)
            facts: dict[str, Fact] = {"run": "bench", "group": group_id, "step": 3, "staleness": 1, "replayed": False}
            made.record(
                Span(name="queue", context=root.child("queue"), parent=root, began_ns=1, ended_ns=2, facts=facts)
            )
        made.close()

    def off() -> None:
        for _ in group_ids:
            for stage in ("preparing", "generating", "scoring", "pushing"):
                UNTRACED.entered(stage)
            process.carried()
            process.carried()

    figures = {"decide": least_us(decide, MANY), "span": least_us(spans, MANY), "off": least_us(off, MANY)}
    tracer.close()
    return {name: float(f"{value:.3g}") for name, value in figures.items()}


def of_group(figures: dict[str, float], load: str, part: float) -> float:
    """Microseconds that tracing adds to a group of a load, where this part of the groups is traced."""
    return DECISIONS[load] * figures["decide"] + part * SPANS[load] * figures["span"]
