"""Requests of one engine that are under way, from `generate` to its return, and the gate that they pass first.

Invariants: an id is under way at most once at a time; a token that has arrived is in hand, cut off, or in a result.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

from buffer_wire.errors import InvalidField
from rollout_workers.engine.errors import EngineTimeout
from rollout_workers.engine.gate import Gate
from rollout_workers.engine.types import SampleRequest


class Arriving(Protocol):
    """Answer of a call, as far as it has arrived."""

    @property
    def in_hand(self) -> int:
        """Tokens that have arrived."""
        ...


class Flights:
    """Requests under way at the engine of this address."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.gate = Gate()
        self.live: set[str] = set()
        """Ids of requests whose `generate` has not returned."""
        self._aborted: set[str] = set()
        """Ids of live requests that were aborted and must not be sent again."""
        self._some_ended = asyncio.Condition()
        self._answers: set[Arriving] = set()
        self._cut_off = 0
        self._given_up: dict[asyncio.Future[str], frozenset[str]] = {}
        """Request ids of each call under way, by a future that is done, with the reason, once nobody waits for the
        call."""

    @asynccontextmanager
    async def of(self, requests: Sequence[SampleRequest]) -> AsyncIterator[None]:
        """Have these requests under way. Raises InvalidField for an id that is under way already."""
        rids = {request.rid for request in requests}
        if rids & self.live:
            raise InvalidField("rid", min(rids & self.live), "unique among the requests in flight")
        self.live |= rids
        try:
            yield
        finally:
            self.live -= rids
            self._aborted -= rids
            async with self._some_ended:
                self._some_ended.notify_all()

    async def let_through(
        self, requests: Sequence[SampleRequest], deadline: float, allowed_s: float
    ) -> list[SampleRequest]:
        """Wait while the engine is paused; returns the requests that were not given up meanwhile.

        Raises EngineTimeout at `deadline`, on the monotonic clock, `allowed_s` after the call began.
        """
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                given_up = await self.gate.pass_through({request.rid for request in requests})
        except TimeoutError as error:
            raise EngineTimeout(self._address, "waiting for it to be resumed", allowed_s) from error
        return [request for request in requests if request.rid not in given_up | self._aborted]

    async def give_up(self, rids: Collection[str]) -> None:
        """Let none of these requests be sent any more; those that wait at the gate end."""
        self._aborted |= self.live.intersection(rids)
        await self.gate.give_up(rids)

    @contextmanager
    def call(self, rids: Collection[str], answers: Collection[Arriving]) -> Iterator[asyncio.Future[str]]:
        """Have a call for these requests under way; yields a future that is done, with the reason, once nobody waits
        for the call any more.
        """
        gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._given_up[gone] = frozenset(rids)
        self._answers.update(answers)
        try:
            yield gone
        finally:
            del self._given_up[gone]
            self._answers.difference_update(answers)

    def cut_off(self, answers: Collection[Arriving]) -> None:
        """Count what has arrived of a call that is cancelled: from now on it is not in hand."""
        self._cut_off += sum(answer.in_hand for answer in self._answers.intersection(answers))
        self._answers.difference_update(answers)

    @property
    def tokens_in_hand(self) -> int:
        """Tokens that have arrived of calls that are under way."""
        return sum(answer.in_hand for answer in self._answers)

    def take_cut_off(self) -> int:
        """Tokens that had arrived of calls that were cancelled, since this was asked last."""
        tokens, self._cut_off = self._cut_off, 0
        return tokens

    def end_calls(self, why: str, rids: Collection[str] | None = None) -> None:
        """End the calls that are under way, or those that are for none but these requests."""
        for gone, asked in self._given_up.items():
            if not gone.done() and (rids is None or asked.issubset(rids)):
                gone.set_result(why)

    def sent(self, rids: Collection[str] | None = None) -> set[str]:
        """Those of `rids`, or of all, that are under way beyond the gate."""
        return (self.live if rids is None else self.live.intersection(rids)) - self.gate.waiting

    async def until_ended(self, rids: Collection[str], within_s: float) -> None:
        """Wait until none of these requests is under way, at most `within_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s), self._some_ended:
                await self._some_ended.wait_for(lambda: self.live.isdisjoint(rids))
