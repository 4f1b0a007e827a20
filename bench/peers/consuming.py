"""Commands of a consumer. Each command begins and ends with nothing queued; every group comes once, or it fails.

Clocks are CLOCK_MONOTONIC, which processes share.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from bench.measure import cpu_s
from bench.peers.groups import Columns, Size
from bench.peers.loops import BATCH, Consumer
from bench.peers.signals import Signals

SETTLE_S = 0.05
"""Pause between a batch's last push and its pull."""
CHECKED_BATCHES = 3
"""Batches of a flow whose first and last group are compared value by value; of all others every value is read."""


class Consuming:
    """Commands of one consumer."""

    def __init__(self, consumer: Consumer, signals: Signals, size: Size) -> None:
        self._consumer = consumer
        self._signals = signals
        self._size = size
        self._seen: set[int] = set()
        self.commands: dict[str, Callable[..., object]] = {
            "flow": self._flow,
            "rest": self._rest,
            "singles": self._singles,
            "batches": self._batches,
            "facts": consumer.facts,
            "close": consumer.close,
        }

    def _flow(self, warm_s: float, for_s: float, pids: Mapping[str, Sequence[int]]) -> dict[str, float]:
        """Batches for so long. Groups a second, and by part of `pids` the CPU seconds a group."""
        start = began = time.monotonic()
        before: dict[str, float] = {}
        first = batches = 0
        while not before or time.monotonic() - began < for_s:
            if not before and time.monotonic() - start >= warm_s:
                before = {part: cpu_s(its) for part, its in pids.items()}
                began, first = time.monotonic(), len(self._seen)
            self._take(BATCH, checked=batches < CHECKED_BATCHES)
            self._signals.count_pulled(BATCH)
            batches += 1
        took_s, groups = time.monotonic() - began, len(self._seen) - first
        spent = {part: (cpu_s(its) - before[part]) / groups for part, its in pids.items()}
        self._signals.end()
        return {"groups_per_s": groups / took_s, **spent}

    def _rest(self, pushed: int) -> None:
        """Pull what a flow has left, of so many groups pushed since the beginning."""
        while left := pushed - len(self._seen):
            self._take(min(BATCH, left))
        if self._seen != set(range(pushed)):
            raise RuntimeError("groups came that were not pushed")

    def _singles(self, count: int) -> list[float]:
        """Times at which each group had come and had been read."""
        ended = []
        for _ in range(count):
            self._signals.tell_ready()
            self._take(1)
            ended.append(time.monotonic())
        return ended

    def _batches(self, count: int) -> list[float]:
        """Durations of pulls of a batch that is there."""
        took = []
        for _ in range(count):
            self._signals.tell_ready()
            self._signals.wait_pushed()
            time.sleep(SETTLE_S)
            began = time.monotonic()
            self._take(BATCH)
            took.append(time.monotonic() - began)
        return took

    def _take(self, count: int, *, checked: bool = False) -> None:
        groups: Sequence[Columns] = self._consumer.pull(count)
        before = len(self._seen)
        for group in groups:
            group.read()
            self._seen.add(group.uid)
        if len(groups) != count or len(self._seen) != before + count:
            raise RuntimeError(f"{len(groups)} groups in place of {count}, {len(self._seen) - before} of them new")
        if checked:
            groups[0].check(self._size)
            groups[-1].check(self._size)
