"""Metrics of processes that come and go, in memory that outlives them and that they never lack by surprise."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.registry import Collector

from buffer_service.observability import shared_values
from buffer_service.observability.shared_values import SharedMetrics, share_values


@pytest.fixture(autouse=True)
def values_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_client.values, "ValueClass", prometheus_client.values.ValueClass)


class Process:
    """Process of this number, with what it counts."""

    def __init__(self, shared: SharedMetrics | None, number: int = 0) -> None:
        if shared is not None:
            share_values(shared.memories[number])
        self.registry = CollectorRegistry()
        self.calls = Counter("calls", "Calls.", ["method"], registry=self.registry)
        self.seconds = Histogram("seconds", "Seconds.", ["method"], buckets=(0.5, 1, 10), registry=self.registry)
        self.open = Gauge("open", "Open.", registry=self.registry)

    def work(self, method: str = "Push", seconds: float = 0.7) -> None:
        self.calls.labels(method).inc()
        self.seconds.labels(method).observe(seconds)
        self.open.inc()


class Seen(Collector):
    """Values as the supervisor sees them."""

    def __init__(self, shared: SharedMetrics) -> None:
        self._shared = shared

    def collect(self) -> Iterator[Metric]:
        return self._shared.collect()

    def value(self, name: str, **labels: str) -> float | None:
        registry = CollectorRegistry()
        registry.register(self)
        return registry.get_sample_value(name, labels)


def text_of(collector: Collector | CollectorRegistry) -> list[str]:
    registry = collector
    if not isinstance(collector, CollectorRegistry):
        registry = CollectorRegistry()
        registry.register(collector)
    assert isinstance(registry, CollectorRegistry)
    lines = generate_latest(registry).decode().splitlines()
    return sorted(line for line in lines if "_created" not in line)


def test_what_one_process_counts_reads_as_if_it_were_not_shared() -> None:
    alone = Process(None)
    shared = SharedMetrics(1)
    for process in (alone, Process(shared)):
        for method, seconds in (("Push", 0.1), ("Push", 0.7), ("Pull", 5), ("Pull", 100)):
            process.work(method, seconds)
    assert text_of(Seen(shared)) == text_of(alone.registry)


def test_processes_are_added_up_and_what_one_has_counted_outlives_it() -> None:
    shared = SharedMetrics(2)
    seen = Seen(shared)
    for number in (0, 1):
        Process(shared, number).work()
    assert (seen.value("calls_total", method="Push"), seen.value("open")) == (2, 2)
    shared.ended(shared.memories[1])
    assert (seen.value("calls_total", method="Push"), seen.value("open")) == (2, 1)
    Process(shared, 1).work()
    assert (seen.value("calls_total", method="Push"), seen.value("open")) == (3, 2)
    assert seen.value("seconds_bucket", method="Push", le="1.0") == 3
    assert seen.value("seconds_count", method="Push") == 3


def test_values_of_many_blocks_are_all_found_also_by_the_next_process() -> None:
    shared = SharedMetrics(1)
    names = [f"method-{number}" for number in range(2_000)]
    for _ in range(2):
        process = Process(shared)
        for name in names:
            process.calls.labels(name).inc()
    assert os.fstat(shared.memories[0]).st_size > 2 * shared_values.BLOCK_BYTES
    assert [Seen(shared).value("calls_total", method=name) for name in names] == [2] * len(names)


def test_a_value_for_which_there_is_no_memory_is_counted_by_its_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedMetrics(1)
    Process(shared).work("before")

    def none_left(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", none_left)
    process = Process(shared)
    for number in range(1_000):
        process.work(f"method-{number}")
    assert process.registry.get_sample_value("calls_total", {"method": "method-999"}) == 1
    assert Seen(shared).value("calls_total", method="before") == 1
    assert Seen(shared).value("calls_total", method="method-999") is None


STARVED = """
import resource, sys
from prometheus_client import CollectorRegistry, Counter
from buffer_service.observability.shared_values import BLOCK_BYTES, share_values
resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES, BLOCK_BYTES))
share_values(int(sys.argv[1]))
counter = Counter("calls", "Calls.", ["method"], registry=CollectorRegistry())
for number in range(2_000):
    counter.labels(str(number)).inc()
"""


def test_a_process_that_is_refused_memory_by_the_system_lives() -> None:
    """Memory like that of files on a full disk: it gets no more than a block; a write to what is not there would end it
    by SIGBUS.
    """
    shared = SharedMetrics(1)
    memory = shared.memories[0]
    command = [sys.executable, "-c", STARVED, str(memory)]
    ended = subprocess.run(command, pass_fds=(memory,), capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "not reported" in ended.stdout + ended.stderr
    assert os.fstat(memory).st_size == shared_values.BLOCK_BYTES
    assert Seen(shared).value("calls_total", method="0") == 1
