"""A question to the store that many have at the same time, asked once for all of them."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from buffer_wire.errors import StoreFault

T = TypeVar("T")


@dataclass(slots=True)
class _Call(Generic[T]):
    """A question and its outcome, shared by all who came before it was sent."""

    outcome: T | None = None
    failure: StoreFault | None = None


class SharedCalls(Generic[T]):
    """Questions, one after another. An answer is to a question that was sent after its caller came; nobody waits
    longer than two questions take.
    """

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._turn = asyncio.Lock()
        self._next: _Call[T] = _Call()

    async def answer(self) -> T:
        """The answer. Raises the StoreFault with which asking failed."""
        own = self._next
        async with self._turn:
            if own.outcome is None and own.failure is None:
                # Who comes from now on comes too late for this question.
                self._next = _Call()
                try:
                    own.outcome = await self._ask()
                except StoreFault as error:
                    own.failure = error
        if own.outcome is None:
            assert own.failure is not None  # noqa: S101 - one of the two is set
            raise own.failure
        return own.outcome
