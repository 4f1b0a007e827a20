"""Spans through OpenTelemetry's SDK: the one module that knows it. Import it only where tracing is on.

Spans are recorded when they are over, with the ids that `buffer_wire.tracing.contexts` derives. They go into a bounded
queue, which a thread of the SDK's exports. When it is full, spans are left out. So nothing waits for a collector, and
nothing fails with one: what is not delivered is counted, and said once.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import import_module

try:
    from opentelemetry import context as current
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Decision, Sampler, TraceIdRatioBased
    from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags
except ImportError as error:
    raise ImportError(f"traces need OpenTelemetry's SDK: pip install 'rollout-buffer[otel]' ({error})") from error

from buffer_wire.tracing.contexts import Context, RunTraces, Span

logger = logging.getLogger("buffer_wire.tracing")

SCOPE = "rollout_buffer"
"""Name of the instrumentation scope, and beginning of the names of attributes."""
CLOSE_S = 3.0
"""Longest time, in seconds, that the end of a process waits for its last spans to be delivered."""
MAX_ERROR_CHARS = 500
RATIO = 0.01
"""Part of the groups that is traced where no sampler is named: all would cost a quarter of the buffer's CPU."""
_EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
"""Modules of the exporters, by OTEL_EXPORTER_OTLP_PROTOCOL."""


class PlannedIds(RandomIdGenerator):
    """Ids of the span that a thread makes next: the planned ones, else random ones."""

    def __init__(self) -> None:
        self._planned = threading.local()

    def plan(self, context: Context | None) -> None:
        """Give the next span of this thread the ids of `context`; None: random ones."""
        self._planned.context = context

    def generate_trace_id(self) -> int:
        """Trace id of a span without a parent."""
        planned: Context | None = getattr(self._planned, "context", None)
        return planned.trace_id if planned is not None else super().generate_trace_id()

    def generate_span_id(self) -> int:
        """Span id of the next span."""
        planned: Context | None = getattr(self._planned, "context", None)
        return planned.span_id if planned is not None else super().generate_span_id()


class CountedExporter(SpanExporter):
    """Exporter that counts spans which could not be delivered, and says so once in a row of failures.

    `around`: makes the context in which each export is done.
    """

    def __init__(
        self, exporter: SpanExporter, endpoint: str, around: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._around = around
        self.lost = 0
        """Spans that were not delivered."""
        self._fails = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Deliver spans, or count them as lost. Raises nothing."""
        why = "the collector did not take them"
        try:
            with self._around():
                result = self._exporter.export(spans)
        except Exception as error:  # noqa: BLE001 - a trace must not break the work that it is of
            result, why = SpanExportResult.FAILURE, f"{type(error).__name__}: {error}"
        if result is not SpanExportResult.SUCCESS:
            self.lost += len(spans)
            if not self._fails:
                logger.warning("spans are lost, the work goes on: %s at %s", why, self._endpoint)
        elif self._fails:
            logger.warning("spans are delivered to %s again; %d were lost", self._endpoint, self.lost)
        self._fails = result is not SpanExportResult.SUCCESS
        return result

    def shutdown(self) -> None:
        """End the exporter; an export that is repeated gives up."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Do nothing: nothing is kept here."""
        return self._exporter.force_flush(timeout_millis)


class Tracer:
    """Spans of one process. May be used by threads."""

    def __init__(self, service: str, exporter: SpanExporter, attributes: Mapping[str, str] | None = None) -> None:
        named = {"service.name": service, **(attributes or {})}
        if "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
            del named["service.name"]
        self._ids = PlannedIds()
        self._sampler, self._below = _sampler()
        """The sampler for roots, and the bound of what it records if that follows from the last 64 bits of a trace's id
        alone. They are asked by `root`; what comes to `record` is recorded.
        """
        self._provider = TracerProvider(
            ALWAYS_ON, Resource.create(named), shutdown_on_exit=False, id_generator=self._ids
        )
        # Its queue is that of OTEL_BSP_*.
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(SCOPE)

    def root(self, run: RunTraces, group_id: str) -> Context | None:
        """Root of the trace of a group, `task_id/incarnation`; None where it is not recorded.

        Every process with the same sampler decides alike.
        """
        trace_id = run.group_trace_id(group_id)
        if self._below is not None:
            return Context.root_of(trace_id) if trace_id & _LAST_BITS < self._below else None
        decided = self._sampler.should_sample(_NOTHING, trace_id, "")
        return Context.root_of(trace_id) if decided.decision is Decision.RECORD_AND_SAMPLE else None

    def record(self, span: Span) -> None:
        """Record a span that is over."""
        around = trace.set_span_in_context(NonRecordingSpan(_wire(span.parent)), _NOTHING) if span.parent else _NOTHING
        self._ids.plan(span.context)
        try:
            made = self._tracer.start_span(
                span.name,
                around,
                kind=SpanKind.SERVER if span.serves else SpanKind.INTERNAL,
                attributes={_name(key): value for key, value in span.facts.items() if value is not None},
                links=[Link(_wire(one)) for one in span.links],
                start_time=span.began_ns,
            )
        finally:
            self._ids.plan(None)
        if span.error:
            made.set_status(Status(StatusCode.ERROR, span.error[:MAX_ERROR_CHARS]))
        made.end(max(span.began_ns, span.ended_ns))

    def enter(self, context: Context) -> None:
        """Make `context` the current one of this task or thread, for what is called and what others trace in it."""
        current.attach(trace.set_span_in_context(NonRecordingSpan(_wire(context))))

    @contextmanager
    def within(self, context: Context) -> Iterator[None]:
        """Make `context` the current one for as long as the block lasts."""
        token = current.attach(trace.set_span_in_context(NonRecordingSpan(_wire(context))))
        try:
            yield
        finally:
            current.detach(token)

    def current(self) -> Context | None:
        """Context of the present task or thread, of whoever traces it; None where it has none that is sampled."""
        found = trace.get_current_span().get_span_context()
        return Context(found.trace_id, found.span_id) if found.is_valid and found.trace_flags.sampled else None

    def close(self) -> None:
        """Deliver what is left, for at most CLOSE_S."""
        ending = threading.Thread(target=self._provider.shutdown, name="tracing end", daemon=True)
        ending.start()
        ending.join(CLOSE_S)
        if ending.is_alive():
            logger.warning("the last spans were not delivered within %g s", CLOSE_S)


_NOTHING = current.Context()
_LAST_BITS = TraceIdRatioBased.TRACE_ID_LIMIT


def _sampler() -> tuple[Sampler, int | None]:
    """The sampler for roots by OTEL_TRACES_SAMPLER, and, of one by ratio, the bound of the ids' last bits."""
    name = os.environ.get("OTEL_TRACES_SAMPLER", "").strip().lower()
    named_ratio = os.environ.get("OTEL_TRACES_SAMPLER_ARG", "") if name else str(RATIO)
    # A root has no parent, so that it is asked for what the name says after that.
    if name.removeprefix("parentbased_") in {"", "traceidratio"}:
        with suppress(ValueError):
            by_ratio = TraceIdRatioBased(float(named_ratio))
            return by_ratio, by_ratio.bound
    return TracerProvider(shutdown_on_exit=False).sampler, None


def _name(key: str) -> str:
    return key if "." in key else f"{SCOPE}.{key}"


def _wire(context: Context) -> SpanContext:
    return SpanContext(context.trace_id, context.span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def exporter_of_environment(around: Callable[[], AbstractContextManager[object]]) -> CountedExporter:
    """Exporter by OTEL_EXPORTER_OTLP_*, over HTTP unless the protocol says gRPC. Raises ImportError, ValueError.

    `around`: makes the context in which each export over gRPC is done.
    """
    protocol = (
        os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or "http/protobuf"
    )
    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"]
    if protocol not in _EXPORTERS:
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}, not one of {', '.join(_EXPORTERS)}")
    try:
        exporter = import_module(_EXPORTERS[protocol])
    except ImportError as error:
        raise ImportError(f"traces need OTLP's exporter: pip install 'rollout-buffer[otel]' ({error})") from error
    made: SpanExporter = exporter.OTLPSpanExporter()
    return CountedExporter(made, endpoint, around if protocol == "grpc" else nullcontext)
