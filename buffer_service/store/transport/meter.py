"""Measurement of the calls to the store."""

import time
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from buffer_wire.errors import RolloutBufferError

T = TypeVar("T")


class CallMeter(Protocol):
    """Meter of calls, by the name of the script, or `fetch`, `put` or `delete` (payloads) or `command` (any single
    command).
    """

    def took(self, operation: str, seconds: float) -> None:
        """A call ended after so long, in whatever way."""
        ...

    def failed(self, kind: str) -> None:
        """A call failed with an error of that reason."""
        ...


class NoMeter:
    """Measures nothing."""

    def took(self, operation: str, seconds: float) -> None:
        """Ignore the call's duration."""

    def failed(self, kind: str) -> None:
        """Ignore the call's failure."""


async def measured(meter: CallMeter, operation: str, call: Coroutine[Any, Any, T]) -> T:
    """The outcome of a call, which the meter is told of."""
    started = time.perf_counter()
    try:
        return await call
    except RolloutBufferError as error:
        meter.failed(error.reason)
        raise
    finally:
        meter.took(operation, time.perf_counter() - started)
