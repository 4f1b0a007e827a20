"""Tracing of this process: on where OpenTelemetry's own variables name a collector and the extra `otel` is there.

Off, nothing of OpenTelemetry is imported: `tracer()` is None, and that is all that anybody asks.
"""

import atexit
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from buffer_wire.tracing.contexts import TRACEPARENT

if TYPE_CHECKING:
    from buffer_wire.tracing.sdk import Tracer

logger = logging.getLogger("buffer_wire.tracing")

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables of which one names the collector where tracing is on."""


class _Process:
    started = False
    tracer: "Tracer | None" = None


def is_wanted(environment: Mapping[str, str]) -> bool:
    """True where the variables name a collector and do not turn traces off."""
    off = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    others = environment.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() not in {"", "otlp"}
    none = environment.get("OTEL_TRACES_SAMPLER", "").strip().lower() in {"always_off", "parentbased_always_off"}
    return not (off or others or none) and any(environment.get(name) for name in ENDPOINTS)


def start(
    service: str,
    attributes: Mapping[str, str] | None = None,
    *,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    owns_process: bool = True,
) -> "Tracer | None":
    """Begin to trace this process as `service`, once, if that is wanted; returns its tracer.

    `attributes`: of the resource. `around`: makes the context in which each export over gRPC is done. `owns_process`
    False: the application is somebody else's, which hears all that OpenTelemetry logs, and calls no `stop`.
    """
    if _Process.started:
        return _Process.tracer
    _Process.started = True
    if is_wanted(os.environ):
        try:
            from buffer_wire.tracing.sdk import Tracer, exporter_of_environment

            _Process.tracer = Tracer(service, exporter_of_environment(around), attributes)
        except ImportError as error:
            # The variables may be meant for others in a process that is not ours.
            level = logging.WARNING if owns_process else logging.INFO
            logger.log(level, "no traces, though a collector is named: %s", error)
        except Exception as error:  # noqa: BLE001 - a trace must not break the work that it is of
            logger.warning("no traces, though a collector is named: %s: %s", type(error).__name__, error)
        if owns_process:
            # Each failed export would be told by these several times; CountedExporter tells it once.
            for name in ("opentelemetry.exporter", "opentelemetry.sdk"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
        else:
            atexit.register(stop)
    return _Process.tracer


def tracer() -> "Tracer | None":
    """Tracer of this process; None while tracing is off."""
    return _Process.tracer


def carried() -> tuple[tuple[str, str], ...]:
    """Metadata, or header fields, by which a call that is made now carries its caller's context; none without one."""
    if _Process.tracer is None or (context := _Process.tracer.current()) is None:
        return ()
    return ((TRACEPARENT, context.traceparent),)


def stop() -> None:
    """End tracing: what is left is delivered, as far as that is possible in a moment."""
    ended, _Process.tracer, _Process.started = _Process.tracer, None, False
    if ended is not None:
        ended.close()
