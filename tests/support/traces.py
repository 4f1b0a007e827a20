"""A receiver of spans, and this process traced to it: a fixture for the modules that import it."""

from collections.abc import Iterator

import pytest

from bench.traces.receiver import Receiver, receiver
from buffer_wire.tracing import process

VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_SAMPLER")


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """A receiver that this process and its children are told of; nothing is traced before or after."""
    process.stop()
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with receiver() as made:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.address)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
        yield made
        process.stop()
