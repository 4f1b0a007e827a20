"""Commands of a producer: flow, groups at light load, and batches. Clocks are CLOCK_MONOTONIC, which processes
share.
"""

import random
import time
from typing import TYPE_CHECKING

from bench.peers.groups import Size, template
from bench.peers.loops import BATCH, Group, Producer, Source
from bench.peers.signals import Signals

if TYPE_CHECKING:
    from collections.abc import Callable

LIGHT_LOAD_S = (0.004, 0.008)
"""Pause before each push at light load, drawn between these."""


class Producing:
    """Commands of one producer. Groups are numbered through all of them."""

    def __init__(self, producer: Producer, signals: Signals, size: Size) -> None:
        self._producer = producer
        self._signals = signals
        self._size = size
        self._pushed = 0
        self._rng = random.Random(7)
        self.commands: dict[str, Callable[..., object]] = {
            "flow": self._flow,
            "singles": self._singles,
            "batches": self._batches,
            "facts": producer.facts,
            "close": producer.close,
        }

    def _flow(self) -> int:
        """Number of groups pushed by now."""
        source = Source(self._signals, self._size, self._pushed)
        self._producer.flow(source)
        self._pushed += source.given
        return self._pushed

    def _singles(self, count: int) -> list[float]:
        """Times before each push."""
        began = []
        for _ in range(count):
            group = self._next()
            self._signals.wait_ready()
            time.sleep(self._rng.uniform(*LIGHT_LOAD_S))
            began.append(time.monotonic())
            self._producer.push(group)
        return began

    def _batches(self, count: int) -> None:
        for _ in range(count):
            self._signals.wait_ready()
            for _ in range(BATCH):
                self._producer.push(self._next())
            self._signals.tell_pushed()

    def _next(self) -> Group:
        uid = self._pushed
        self._pushed += 1
        return uid, template(self._size, uid)
