"""The one loop in which a pull waits, of both clients, of sessions and of data sets.

Invariants: every try that comes to nothing is told before the next one; no try begins after the time is up; the service
holds a try for at most `PULL_SLICE_S`, so that a caller hears as often on whom it waits.
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from buffer_wire.errors import BatchNotReady, RolloutBufferError
from buffer_wire.retry import Backoff, Mend, OnRetry, Tokens, retry_async, retry_sync
from trainer_client.client.driver import Deadline, worth_repeating

T = TypeVar("T")

MIN_PULL_INTERVAL_S = 0.05
"""Least time between two tries, should the service not hold the wait that it was asked for."""

Told: TypeAlias = Callable[[RolloutBufferError], None]
"""Told of every try that came to nothing and is repeated. What it raises ends the wait."""


def _pause(error: RolloutBufferError) -> float | None:
    """A batch that is not ready is asked for again soon: the service itself has waited."""
    return MIN_PULL_INTERVAL_S if isinstance(error, BatchNotReady) else None


_BACKOFF = Backoff(ceiling_s=1.0, pause=_pause)


def _on_retry(told: Told) -> OnRetry:
    return lambda error, _attempts, _wait_s: told(error)


@dataclass(frozen=True, slots=True)
class PullLoop:
    """Tries until one succeeds, the time is up, or an error comes that no later try can cure."""

    service: str
    """Its address, for notices."""
    tokens: Tokens | None = None
    mend: Mend | None = None

    @property
    def _waiting_on(self) -> str:
        return f"the service at {self.service}"

    def run(self, attempt: Callable[[Deadline], T], told: Told, timeout_s: float = math.inf) -> T:
        """The first result of `attempt`, which is given how long the whole pull may take."""
        within = Deadline.after(timeout_s)
        return retry_sync(
            lambda: attempt(within),
            deadline_s=timeout_s,
            waiting_on=self._waiting_on,
            backoff=_BACKOFF,
            retry_on=worth_repeating,
            on_retry=_on_retry(told),
            tokens=self.tokens,
            mend=self.mend,
        )

    async def run_async(self, attempt: Callable[[Deadline], Awaitable[T]], told: Told, timeout_s: float) -> T:
        """`run` for coroutines."""
        within = Deadline.after(timeout_s)
        return await retry_async(
            lambda: attempt(within),
            deadline_s=timeout_s,
            waiting_on=self._waiting_on,
            backoff=_BACKOFF,
            retry_on=worth_repeating,
            on_retry=_on_retry(told),
            tokens=self.tokens,
            mend=self.mend,
        )
