"""Times of the phases of one engine's reloads, for the service's metrics.

Invariant: what is shown never falls, so that only a new process of the worker counts from 0 again.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from rollout_buffer.v1 import weights_pb2

Phase: TypeAlias = "weights_pb2.ReloadPhase.ValueType"


class PhaseMeter:
    """Meter of one engine, over all its reloads; attempts that failed count too."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[Phase, int] = {}
        self._seconds: dict[Phase, float] = {}

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Count a phase that the engine is in now, however it ends."""
        began = self._clock()
        try:
            yield
        finally:
            self._counts[phase] = self._counts.get(phase, 0) + 1
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self._clock() - began

    def show(self) -> list[weights_pb2.ReloadPhaseTime]:
        """Totals as of now, in order of the phases."""
        return [
            weights_pb2.ReloadPhaseTime(phase=phase, count=count, time_ms=int(1_000 * self._seconds[phase]))
            for phase, count in sorted(self._counts.items())
        ]
