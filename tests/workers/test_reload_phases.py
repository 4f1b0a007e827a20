"""Tests of how long the phases of reloads take, as a worker reports it."""

import contextlib

from rollout_buffer.v1 import weights_pb2
from rollout_workers.slots.reload_phases import PhaseMeter


def test_phases_are_counted_however_they_end() -> None:
    now = 100.0
    meter = PhaseMeter(lambda: now)
    assert meter.show() == []
    for seconds in (0.5, 0.25):
        with meter.during(weights_pb2.RELOAD_PHASE_LOAD):
            now += seconds
    with contextlib.suppress(TimeoutError), meter.during(weights_pb2.RELOAD_PHASE_PAUSE):
        now += 3.0
        raise TimeoutError
    assert [(one.phase, one.count, one.time_ms) for one in meter.show()] == [
        (weights_pb2.RELOAD_PHASE_PAUSE, 1, 3_000),
        (weights_pb2.RELOAD_PHASE_LOAD, 2, 750),
    ]
