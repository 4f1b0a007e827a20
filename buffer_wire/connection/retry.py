"""RPCs repeated until they succeed: which errors are repeated, how long to wait in between, and when to give up.

Every request of the contract may be repeated as it is (identities make repeats harmless). So a lost reply, a restarting
service and a full queue are met the same way. The last error is raised as it came, with a note on the attempts.

    await Retry(deadline_s=60, waiting_on="the service at host:port").asyncio(lambda: stub.Commit(request, timeout=5))
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

import grpc

from buffer_wire.errors import RolloutBufferError, Unauthenticated
from buffer_wire.status import error_of

T = TypeVar("T")

OnRetry = Callable[[RolloutBufferError, int, float], None]
"""Callback before each wait, with the error, the attempts so far and the coming wait in seconds."""

Mend = Callable[[RolloutBufferError], bool]
"""Callback with each error; True when it has done away with the cause (revisions.Revisions.met)."""


def _no_pause(_: RolloutBufferError) -> None:
    """Default of `Backoff.pause`: treats every answer as one for which the service has not waited."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that double from `first_s` up to `ceiling_s`, each drawn from the upper half of its range."""

    first_s: float = 0.05
    ceiling_s: float = 2.0
    pause: Callable[[RolloutBufferError], float | None] = _no_pause
    """Seconds to wait after an answer for which the service itself has waited; None: the doubling wait."""

    def delays(self) -> Iterator[float]:
        """Waits in seconds, without end."""
        limit = self.first_s
        while True:
            yield limit * random.uniform(0.5, 1.0)  # noqa: S311 - spreads callers, no secret
            limit = min(limit * 2, self.ceiling_s)


DEFAULT_BACKOFF = Backoff()


class Tokens(Protocol):
    """Source of a caller's token."""

    @property
    def current(self) -> str:
        """The token that the next attempt carries."""
        ...

    def renew(self, refused: str) -> bool:
        """True when there is another one than this."""
        ...


def is_retryable(error: RolloutBufferError) -> bool:
    """True when the same request can succeed later."""
    return error.retryable


def rpc_error(error: grpc.RpcError) -> RolloutBufferError:
    """The error that a failed RPC carries, of a sync or an asyncio stub."""
    trailing = cast("Iterable[tuple[str, str | bytes]] | None", error.trailing_metadata())
    return error_of(error.code(), error.details(), trailing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Repetition of a call on errors for which `retry_on` holds.

    A refused token is replaced where `tokens` has another one by then, and what `mend` mends is repeated at once.
    """

    deadline_s: float
    """Seconds after the first attempt in which the last one begins; give each attempt a timeout of its own."""
    waiting_on: str
    """Name of who is waited for, for the note on the last error."""
    backoff: Backoff = DEFAULT_BACKOFF
    retry_on: Callable[[RolloutBufferError], bool] = is_retryable
    on_retry: OnRetry | None = None
    tokens: Tokens | None = None
    mend: Mend | None = None

    def blocking(self, call: Callable[[], T]) -> T:
        """Result of `call()`. Raises the last RolloutBufferError; gRPC's errors are translated, others pass through."""
        attempts = _Attempts(self)
        while True:
            attempts.begin()
            try:
                return call()
            except (grpc.RpcError, RolloutBufferError) as raised:
                wait = attempts.next_wait(raised)
            time.sleep(wait)

    async def asyncio(self, call: Callable[[], Awaitable[T]]) -> T:
        """Do what `blocking` does, for coroutines."""
        attempts = _Attempts(self)
        while True:
            attempts.begin()
            try:
                return await call()
            except (grpc.RpcError, RolloutBufferError) as raised:
                wait = attempts.next_wait(raised)
            await asyncio.sleep(wait)


class _Attempts:
    """Bookkeeping of one retried call; `next_wait` raises the last error when there is no time left."""

    def __init__(self, retry: Retry) -> None:
        self._retry = retry
        self._token = ""
        self._started = time.monotonic()
        self._delays = retry.backoff.delays()
        self._attempts = 0

    def begin(self) -> None:
        """Begin an attempt: note the token that it carries."""
        if self._retry.tokens is not None:
            self._token = self._retry.tokens.current

    def next_wait(self, raised: Exception) -> float:
        """Seconds to wait before the next attempt."""
        retry, error = self._retry, raised
        if isinstance(raised, grpc.RpcError):
            error = rpc_error(raised)
            error.__cause__ = raised
        if not isinstance(error, RolloutBufferError):
            raise raised
        self._attempts += 1
        if isinstance(error, Unauthenticated) and retry.tokens is not None and retry.tokens.renew(self._token):
            return 0.0
        if retry.mend is not None and retry.mend(error):
            return 0.0
        if not retry.retry_on(error):
            raise error
        pause = retry.backoff.pause(error)
        if pause is not None:
            # The service answers: what goes wrong from here on has just begun.
            self._delays = retry.backoff.delays()
        wait = next(self._delays) if pause is None else pause
        spent = time.monotonic() - self._started
        if spent + wait > retry.deadline_s:
            if pause is None:
                error.add_note(
                    f"gave up after {self._attempts} attempts in {spent:.1f} s of waiting on {retry.waiting_on}"
                )
            raise error
        if retry.on_retry is not None:
            retry.on_retry(error, self._attempts, wait)
        return wait
