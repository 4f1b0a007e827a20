"""Values of metrics in memory that an rpc process shares with its supervisor, who reads it for every scrape.

No file of the data directory holds them, so that a full disk cannot end a process that counts. Invariants: memory is
allocated before it is mapped, so no write of a value can fail. Where no memory is left the value is counted for the
process alone, and the log says so. The memory is the supervisor's: it outlives a process, however that dies, and the
next process in its place goes on counting.

A block holds records, one after another. A record has the length of the description (0 where there is none yet), the
description, and at the next multiple of 8 the value.
"""

import json
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any

import prometheus_client
import structlog
from prometheus_client import Metric

log = structlog.get_logger(__name__)

BLOCK_BYTES = 1 << 16
_LENGTH = struct.Struct("=Q")
_VALUE = struct.Struct("=d")
_GAUGE = "gauge"


class SharedMetrics:
    """The supervisor's side: a memory for each of the processes that run at once."""

    def __init__(self, processes: int) -> None:
        self.memories = [os.memfd_create("rollout-buffer-metrics") for _ in range(processes)]

    def ended(self, one: int) -> None:
        """The process of that memory has ended: what its gauges say is over, what it has counted stays."""
        for at, description, _ in _records(one):
            if description[0] == _GAUGE:
                os.pwrite(one, _VALUE.pack(0.0), at)

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families, added up over the processes."""
        families: dict[str, tuple[Metric, dict[tuple[str, tuple[tuple[str, str], ...]], float]]] = {}
        for one in self.memories:
            for _, (kind, family, text, name, labels), value in _records(one):
                _, sums = families.setdefault(family, (Metric(family, text, kind), {}))
                sample = (name, tuple(labels.items()))
                sums[sample] = sums.get(sample, 0.0) + value
        for metric, sums in families.values():
            _add(metric, sums)
            yield metric


def _add(metric: Metric, sums: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> None:
    """Add the samples; those of a histogram's buckets, which are of each alone, with those of the buckets below."""
    below: dict[tuple[tuple[str, str], ...], float] = {}
    for (name, labels), value in sorted(sums.items(), key=_by_bound) if metric.type == "histogram" else sums.items():
        if name.endswith("_bucket"):
            *others, bound = labels
            below[tuple(others)] = total = below.get(tuple(others), 0.0) + value
            metric.add_sample(name, dict(labels), total)
            if bound[1] == "+Inf":
                metric.add_sample(f"{metric.name}_count", dict(others), total)
        else:
            metric.add_sample(name, dict(labels), value)


def _by_bound(sample: tuple[tuple[str, tuple[tuple[str, str], ...]], float]) -> tuple[object, ...]:
    (name, labels), _ = sample
    if not name.endswith("_bucket"):
        return labels, 1, 0.0
    *others, bound = labels
    return tuple(others), 0, float(bound[1])


def _records(one: int) -> Iterator[tuple[int, Any, float]]:
    """Values in a memory: of each its place in bytes, its description, and the value."""
    for start in range(0, os.fstat(one).st_size, BLOCK_BYTES):
        block = os.pread(one, BLOCK_BYTES, start)
        at = 0
        while at < len(block) and (length := _LENGTH.unpack_from(block, at)[0]):
            value_at = _value_at(at, length)
            description = json.loads(block[at + _LENGTH.size : at + _LENGTH.size + length])
            yield start + value_at, description, _VALUE.unpack_from(block, value_at)[0]
            at = value_at + _VALUE.size


def _value_at(at: int, length: int) -> int:
    return at + _LENGTH.size + (length + 7) // 8 * 8


class _Room:
    """Side of a process: its blocks, mapped, and the memory of each value in them."""

    def __init__(self, one: int) -> None:
        self._memory = one
        self._blocks = [self._map(start) for start in range(0, os.fstat(one).st_size, BLOCK_BYTES)]
        self._free = BLOCK_BYTES
        """Offset in the last block from which on there is room."""
        self._values: dict[str, memoryview[float]] = {}
        for at, description, _ in _records(one):
            block, offset = divmod(at, BLOCK_BYTES)
            self._values[json.dumps(description)] = self._blocks[block][offset : offset + _VALUE.size].cast("d")
            if block == len(self._blocks) - 1:
                self._free = offset + _VALUE.size

    def _map(self, start: int) -> memoryview:
        return memoryview(mmap.mmap(self._memory, BLOCK_BYTES, offset=start))

    def value(self, description: str) -> "memoryview[float]":
        """The memory of one value, the same for the same description."""
        if description not in self._values:
            self._values[description] = self._new(description.encode())
        return self._values[description]

    def _new(self, description: bytes) -> "memoryview[float]":
        value_at = _value_at(self._free, len(description))
        if value_at + _VALUE.size > BLOCK_BYTES:
            start = len(self._blocks) * BLOCK_BYTES
            try:
                # Memory that is mapped first and not there when it is written to would end the process.
                os.posix_fallocate(self._memory, start, BLOCK_BYTES)
                self._blocks.append(self._map(start))
            except OSError as error:
                log.warning("a metric is not reported: there is no memory for it", why=str(error))
                return memoryview(bytearray(_VALUE.size)).cast("d")
            self._free = 0
            value_at = _value_at(0, len(description))
        block, at = self._blocks[-1], self._free
        block[at + _LENGTH.size : at + _LENGTH.size + len(description)] = description
        # Last, since the supervisor may read at any time.
        _LENGTH.pack_into(block, at, len(description))
        self._free = value_at + _VALUE.size
        return block[value_at : value_at + _VALUE.size].cast("d")


def share_values(one: int) -> None:
    """Have the values of all metrics that are made from now on lie in the supervisor's memory `one`."""
    room, lock = _Room(one), Lock()

    class SharedValue:
        """Value as prometheus_client uses it."""

        _multiprocess = True

        def __init__(
            self,
            typ: str,
            metric_name: str,
            name: str,
            labelnames: Sequence[str],
            labelvalues: Sequence[str],
            help_text: str,
            **_: object,
        ) -> None:
            labels = dict(zip(labelnames, labelvalues, strict=True))
            with lock:
                self._memory = room.value(json.dumps([typ, metric_name, help_text, name, labels]))

        def inc(self, amount: float) -> None:
            """Add an amount to the value."""
            with lock:
                self._memory[0] += amount

        def set(self, value: float, timestamp: float | None = None) -> None:
            """Set the value."""
            del timestamp
            with lock:
                self._memory[0] = value

        def get(self) -> float:
            """The value."""
            return float(self._memory[0])

        def set_exemplar(self, exemplar: object) -> None:
            """Ignore the exemplar: shared values keep none."""

        def get_exemplar(self) -> None:
            """Return None: shared values keep no exemplars."""

    prometheus_client.values.ValueClass = SharedValue
