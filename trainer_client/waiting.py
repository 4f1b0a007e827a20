"""Notices of waits: the client's activity, on whom it waits and for how long.

Invariant: a wait that lasts is logged at INFO soon after it began, and every `LOG_EVERY_S` from then on. This does not
depend on whether the caller asked for notices.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from buffer_wire.errors import PendingFull, RolloutBufferError, RunPaused, StoreFault

logger = logging.getLogger("trainer_client")

FIRST_LOG_S = 5.0
LOG_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """Notice of a wait: one attempt failed and will be repeated."""

    doing: str
    """Description of the call, for example "pulling step 3"."""
    on: str
    """Party that the call waits on."""
    waited_s: float
    error: RolloutBufferError
    """Error that the attempt ended with."""

    def __str__(self) -> str:
        return f"{self.doing}: waiting for {self.waited_s:.0f} s on {self.on}"


OnWait: TypeAlias = Callable[[Waiting], None]
"""Callback for every attempt that failed and is repeated. What it raises ends the wait."""


@runtime_checkable
class Drawn(Protocol):
    """Callback for `on_wait` that leaves a line on the terminal; clear it before anything else is written there."""

    def clear(self) -> None:
        """Remove the line."""


def waits_on(error: RolloutBufferError, service: str) -> str:
    """Name the party that a caller waits on after `error`; `service` is the service's address."""
    if named := error.attributes.get("waits_on"):
        return named
    if isinstance(error, PendingFull):
        data = error.attributes
        return f"the workers: {data.get('pending')} tasks are pending, the cap is {data.get('limit')}"
    if isinstance(error, RunPaused):
        return "an operator, who has to continue the run"
    if isinstance(error, StoreFault):
        return f"the store behind the service at {service}"
    return f"the service at {service}"


class WaitNotices:
    """Notifier of one call's waits: tells `on_wait` and the log."""

    def __init__(self, doing: str, service: str, on_wait: OnWait | None) -> None:
        self._doing = doing
        self._service = service
        self._on_wait = on_wait
        listener: object = on_wait
        self._drawn = listener if isinstance(listener, Drawn) else None
        self._started = time.monotonic()
        self._next_log_s = FIRST_LOG_S
        self.told = False
        """True once an attempt has failed."""

    def tell(self, error: RolloutBufferError) -> None:
        """Report an attempt that ended with `error` and will be repeated."""
        self.told = True
        waiting = Waiting(self._doing, waits_on(error, self._service), time.monotonic() - self._started, error)
        if waiting.waited_s >= self._next_log_s:
            self._next_log_s = waiting.waited_s + LOG_EVERY_S
            if self._drawn is not None:
                self._drawn.clear()
            logger.info("%s", waiting)
        if self._on_wait is not None:
            self._on_wait(waiting)

    def on_retry(self, error: RolloutBufferError, attempts: int, wait_s: float) -> None:  # noqa: ARG002 - OnRetry's shape
        """Report a failed attempt: `tell` with the signature that `buffer_wire.connection.retry` calls."""
        self.tell(error)
