"""A small receiver of OpenTelemetry's protocol over HTTP, which keeps the spans that it gets.

It is no collector: it stands where a store of traces would, behind one or in place of one, for tests and for the tree
in the docs. The messages are read with the classes of opentelemetry-proto.
"""

import gzip
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

PATH = "/v1/traces"
PREFIX = "rollout_buffer."


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """Span as it was received; ids as hexadecimal digits, times in nanoseconds since 1970."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty for the root of a trace."""
    began_ns: int
    ended_ns: int
    facts: dict[str, object]
    """Attributes, those of ours without their prefix."""
    links: tuple[tuple[str, str], ...]
    """Trace and span ids of the spans that it names."""
    is_server: bool
    error: str


@dataclass(slots=True)
class Receiver:
    """Receiver that is at work; `spans` grows."""

    address: str
    """Base URL, for OTEL_EXPORTER_OTLP_ENDPOINT."""
    spans: list[ReceivedSpan] = field(default_factory=list)
    requests: int = 0
    refuses: bool = False
    """True: requests are answered with 400, which no exporter repeats."""
    drops: bool = False
    """True: spans are not read, which would cost others' time."""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait(self, holds: Callable[[list[ReceivedSpan]], bool], timeout_s: float = 30.0) -> bool:
        """Wait until `holds` of the spans; False when it does not within `timeout_s`."""
        with self.changed:
            return self.changed.wait_for(lambda: holds(self.spans), timeout_s)


@contextmanager
def receiver(port: int = 0) -> Iterator[Receiver]:
    """Receive on a port of loopback, 0 for a free one, until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            with made.changed:
                made.requests += 1
                if not (made.refuses or made.drops) and self.path == PATH:
                    made.spans += spans_of(ExportTraceServiceRequest.FromString(body))
                made.changed.notify_all()
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(400 if made.refuses else 200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    made = Receiver(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def spans_of(request: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    """The spans of a message."""
    for resource in request.resource_spans:
        service = str(_facts(resource.resource.attributes).get("service.name", ""))
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    service,
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    _facts(span.attributes),
                    tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
                    span.kind == trace_pb2.Span.SPAN_KIND_SERVER,
                    span.status.message if span.status.code == trace_pb2.Status.STATUS_CODE_ERROR else "",
                )


def _facts(attributes: Iterable[KeyValue]) -> dict[str, object]:
    return {one.key.removeprefix(PREFIX): _value(one.value) for one in attributes}


def _value(value: AnyValue) -> object:
    return getattr(value, value.WhichOneof("value") or "string_value")
