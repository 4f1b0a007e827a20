"""Tests of how long `rollout-buffer run record --follow` waits for a service that fails, without any service."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from buffer_cli.options import CallOptions
from buffer_cli.run import record as recorder
from buffer_wire.errors import PermissionDenied, RolloutBufferError
from buffer_wire.status import ServiceUnreachable
from rollout_buffer.v1 import runs_pb2

TRY_S = 0.1
"""Time that a call takes until it fails."""


class Failing:
    """Calls of a service that answers once, and fails from then on."""

    def __init__(self, error: RolloutBufferError) -> None:
        self.failures = 0
        self._error = error
        self._answered = False

    def get(self, run_id: str) -> runs_pb2.GetRunResponse:
        if not self._answered:
            self._answered = True
            return runs_pb2.GetRunResponse(run=runs_pb2.Run(run_id=run_id))
        self.failures += 1
        time.sleep(TRY_S)
        raise self._error


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """The command takes them over."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def follow(failing: Failing, folder: Path, monkeypatch: pytest.MonkeyPatch, *, timeout_s: float) -> int:
    @contextmanager
    def calling(*_: Any) -> Iterator[Failing]:
        yield failing

    monkeypatch.setattr(recorder, "calling", calling)
    monkeypatch.setattr(recorder, "EVERY_S", 0.01)
    service = CallOptions(address="nowhere:1", timeout_s=timeout_s)
    return recorder.record("run", folder, service, groups=False, follow=True)


def test_a_service_that_stays_away_is_waited_for_as_long_as_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    service = Failing(ServiceUnreachable("nobody answers", status="UNAVAILABLE"))
    began = time.monotonic()
    assert follow(service, tmp_path, monkeypatch, timeout_s=3 * TRY_S) == 1
    assert 4 * TRY_S <= time.monotonic() - began < 20 * TRY_S
    assert 2 <= service.failures <= 4
    assert "error: " in capsys.readouterr().err


def test_what_no_wait_cures_ends_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    service = Failing(PermissionDenied("ExportRecords", "t", "worker", "read recordings"))
    assert follow(service, tmp_path, monkeypatch, timeout_s=60.0) == 1
    assert service.failures == 1
    told = capsys.readouterr().err
    assert "error: " in told
    assert "waiting: " not in told
