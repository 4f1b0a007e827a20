"""Tracing on and off: what is imported, whose spans are kept, and what becomes of them without a collector."""

import logging
import os
import subprocess
import sys
import time
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from bench.traces.receiver import Receiver
from buffer_wire.tracing import process, sdk
from buffer_wire.tracing.contexts import RunTraces, Span
from buffer_wire.tracing.sdk import Tracer

RUN = RunTraces("r", 5)


def span(name: str = "queue", group: str = "t/0") -> Span:
    root = RUN.group(group)
    return Span(name=name, parent=root, began_ns=1_000, ended_ns=2_000, facts={"staleness": 1, "empty": None})


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("buffer_wire")]


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_SAMPLER": "always_off"}, False),
    ],
)
def test_tracing_is_on_where_a_collector_is_named_and_traces_are_not_turned_off(
    environment: dict[str, str], wanted: bool
) -> None:
    assert process.is_wanted(environment) is wanted


def test_off_nothing_of_opentelemetry_is_imported() -> None:
    program = """
import sys
import rollout_workers.main
from trainer_client import BufferClient
BufferClient("127.0.0.1:1").close()
from buffer_wire.tracing import process
assert process.start("x") is None and process.tracer() is None and process.carried() == ()
assert not any(name.startswith("opentelemetry") for name in sys.modules)
# In the service it is Redis' client that imports a part of it, where it is installed.
import buffer_service.app.process
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk.trace", "opentelemetry.exporter"))])
"""
    around = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False, env=around
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_without_the_extra_the_work_goes_on_and_the_log_says_what_is_missing(
    received: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "buffer_wire.tracing.sdk")
    assert process.start("x") is None
    assert "pip install 'rollout-buffer[otel]'" in "".join(told(caplog))


def test_an_unknown_protocol_is_named_and_the_work_goes_on(
    received: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    assert process.start("x") is None
    assert "http/json, not one of grpc, http/protobuf" in "".join(told(caplog))


def test_spans_arrive_with_the_ids_that_were_derived(received: Receiver) -> None:
    tracer = process.start("a service", {"service.instance.id": "w1"})
    assert tracer is not None
    root = RUN.group("t/0")
    tracer.record(Span(name="rollout", context=root, began_ns=1_000, ended_ns=3_000, error="it broke"))
    tracer.record(span())
    process.stop()

    rollout, queue = sorted(received.spans, key=lambda one: one.name, reverse=True)
    assert (int(rollout.trace_id, 16), int(rollout.span_id, 16)) == (root.trace_id, root.span_id)
    assert (rollout.parent_id, rollout.error, rollout.service) == ("", "it broke", "a service")
    assert (queue.trace_id, queue.parent_id) == (rollout.trace_id, rollout.span_id)
    assert (queue.began_ns, queue.ended_ns, queue.facts) == (1_000, 2_000, {"staleness": 1})


def test_losses_are_said_once_and_their_end_too(received: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    received.refuses = True
    tracer = process.start("x")
    assert tracer is not None
    for requests in (1, 2):
        tracer.record(span())
        received.wait(lambda _, least=requests: received.requests >= least)  # type: ignore[misc]
    received.refuses = False
    tracer.record(span("push"))
    assert received.wait(lambda spans: any(one.name == "push" for one in spans))
    process.stop()
    lost, again = told(caplog)
    assert lost.startswith("spans are lost, the work goes on")
    assert again.endswith("again; 2 were lost")


def test_a_collector_that_is_not_there_holds_up_no_end(
    monkeypatch: pytest.MonkeyPatch, received: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(sdk, "CLOSE_S", 0.3)
    tracer = process.start("x")
    assert tracer is not None
    began = time.monotonic()
    for _ in range(5_000):  # More than the queue holds.
        tracer.record(span())
    recorded = time.monotonic()
    process.stop()
    assert recorded - began < 5
    assert time.monotonic() - recorded < sdk.CLOSE_S + 2
    assert "not delivered" in "".join(told(caplog))


def test_the_environments_sampler_decides_alike_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
    groups = [f"t{i}/0" for i in range(2_000)]
    tracers = [Tracer(name, InMemorySpanExporter()) for name in ("worker", "service")]
    kept = [{group for group in groups if tracers[0].root(RUN, group)}]
    with tracers[1].within(RUN.update(1, 1)):  # Whatever is traced around it.
        kept.append({group for group in groups if tracers[1].root(RUN, group)})
    for tracer in tracers:
        tracer.close()
    assert kept[0] == kept[1]
    assert 400 < len(kept[0]) < 600


def test_one_group_in_a_hundred_is_traced_where_no_sampler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_TRACES_SAMPLER", raising=False)
    tracer = Tracer("worker", InMemorySpanExporter())
    kept = [root for i in range(10_000) if (root := tracer.root(RUN, f"t{i}/0"))]
    tracer.close()
    assert 60 < len(kept) < 140


@pytest.mark.parametrize(
    ("sampler", "part", "all_groups"),
    [
        ("always_on", "", True),
        ("parentbased_always_on", "", True),
        ("traceidratio", "most", True),
        ("always_off", "1", False),
    ],
)
def test_a_sampler_without_a_usable_ratio_decides_as_opentelemetry_does(
    sampler: str, part: str, all_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", part)
    tracer = Tracer("worker", InMemorySpanExporter())
    kept = [root for i in range(100) if (root := tracer.root(RUN, f"t{i}/0"))]
    tracer.close()
    assert kept == ([RUN.group(f"t{i}/0") for i in range(100)] if all_groups else [])


def test_what_is_recorded_is_left_out_by_no_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    exporter = InMemorySpanExporter()
    tracer = Tracer("x", exporter)
    tracer.record(span())
    tracer.record(Span(name="update", context=RUN.update(1, 1), began_ns=1, ended_ns=2))
    tracer.close()
    names: list[Any] = [one.name for one in exporter.get_finished_spans()]
    assert names == ["queue", "update"]


def test_a_call_carries_the_context_in_which_it_is_made(received: Receiver) -> None:
    tracer = process.start("x")
    assert tracer is not None
    assert process.carried() == ()
    context = RUN.group("t/0")
    with tracer.within(context):
        assert process.carried() == (("traceparent", context.traceparent),)
    assert process.carried() == ()


@pytest.fixture(autouse=True)
def _all_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "buffer_wire")
