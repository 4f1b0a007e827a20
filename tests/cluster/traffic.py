"""Pushes and pulls on a run whose payloads lie on a cluster, and what they met: pauses by shard, errors, losses."""

import asyncio
import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from buffer_service import commands
from buffer_service.domain import ops
from buffer_wire.errors import NotReplicated, RolloutBufferError, StoreUnavailable
from buffer_wire.payloads.keys import new_nonce, payload_key
from buffer_wire.resp.slots import slot_of
from tests.store.driver import Run
from tests.support.store_cluster import StoreCluster

BODY = bytes(20_000)

T = TypeVar("T")


def nonce_within(run_id: str, size: int, first: int, last: int) -> bytes:
    """A nonce with which a payload of `size` bytes, its checksum 0, lies in the slots."""
    while True:
        nonce = new_nonce()
        if first <= slot_of(payload_key(run_id, nonce, 0, size)) <= last:
            return nonce


def spread(run: Run, cluster: StoreCluster, bodies: Mapping[str, bytes]) -> list[ops.NewGroup]:
    """Groups of these bodies by task id, over the shards in turn: the first one on the first shard."""
    slots = itertools.cycle((first, last) for first, last, _ in cluster.slots())
    return [
        ops.NewGroup(run.group(name, body).facts, body, 0, nonce_within(run.run_id, len(body), *next(slots)))
        for name, body in bodies.items()
    ]


@dataclass
class Traffic:
    """One pusher for each shard, whose groups all lie there, and a trainer."""

    run: Run
    cluster: StoreCluster
    slots: list[tuple[int, int]] = field(default_factory=list)
    """First and last slot of the pushers; by default those of each shard."""
    acknowledged: int = 0
    of_pusher: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    trained: int = 0
    lost: int = 0
    retried: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Errors that pushers repeated at, by pusher."""
    longest_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Longest time from a pusher's acknowledgement to the next."""
    trainer_met: set[str] = field(default_factory=set)
    """Errors that the trainer repeated at."""
    paused: set[str] = field(default_factory=set)
    _ids: "itertools.count[int]" = field(default_factory=itertools.count)
    _step: int = 0
    _acknowledgement: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def flowing(self) -> AsyncIterator[None]:
        """Traffic until the body ends; then what is under way comes to its end."""
        stop = asyncio.Event()
        slots = self.slots or [(first, last) for first, last, _ in self.cluster.slots()]
        async with asyncio.TaskGroup() as tasks:
            for number, (first, last) in enumerate(slots):
                tasks.create_task(self._push(number, first, last, stop))
            tasks.create_task(self._train(stop))
            try:
                yield
            finally:
                stop.set()

    async def until_acknowledged(self, groups: int, pusher: int | None = None) -> None:
        """Wait until so many more groups were acknowledged, of one pusher or of all."""

        def count() -> int:
            return self.acknowledged if pusher is None else self.of_pusher[pusher]

        enough = count() + groups
        async with asyncio.timeout(60):
            while count() < enough:
                self._acknowledgement.clear()
                await self._acknowledgement.wait()

    async def _push(self, number: int, first: int, last: int, stop: asyncio.Event) -> None:
        done_at = time.monotonic()
        while not stop.is_set():
            outcome = await self._pushed(number, self._group(first, last), first, last)
            now = time.monotonic()
            self.longest_s[number], done_at = max(self.longest_s[number], now - done_at), now
            assert outcome.kind in {ops.PushKind.QUEUED, ops.PushKind.DUPLICATE}
            self.acknowledged += 1
            self.of_pusher[number] += 1
            self._acknowledgement.set()
            await asyncio.sleep(0.005)

    async def _pushed(self, number: int, group: ops.NewGroup, first: int, last: int) -> ops.Pushed:
        while True:
            try:
                (outcome,) = await self.run.push(group)
            except (StoreUnavailable, NotReplicated) as error:
                # As a worker does: the same group again, under another key.
                self.retried[number].add(error.reason)
                await asyncio.sleep(0.05)
                group = ops.NewGroup(group.facts, BODY, 0, self._nonce(first, last))
            else:
                return outcome

    def _group(self, first: int, last: int) -> ops.NewGroup:
        group = self.run.group(f"t{next(self._ids)}", BODY)
        return ops.NewGroup(group.facts, BODY, 0, self._nonce(first, last))

    def _nonce(self, first: int, last: int) -> bytes:
        return nonce_within(self.run.run_id, len(BODY), first, last)

    async def _train(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self._take_step()

    async def _answered(self, call: Callable[[], Awaitable[T]]) -> T:
        """The answer to a call of the trainer, which repeats it: it may have run although none came."""
        while True:
            try:
                return await call()
            except (StoreUnavailable, NotReplicated) as error:
                self.trainer_met.add(error.reason)
                await asyncio.sleep(0.05)

    async def _take_step(self) -> None:
        batch = await self._answered(lambda: self.run.pull(self._step))
        if isinstance(batch, ops.Short):
            await asyncio.sleep(0.01)
            return
        keys = [group.payload_key for group in batch.shard]
        bodies = await self._answered(lambda: self.run.store.fetch(self.run.run_id, keys))
        if gone := [key for key, body in zip(keys, bodies, strict=True) if body is None]:
            self.lost += len(gone)
            report = commands.report_lost(self.run.run_id, self.run.term, self._step, gone)
            await self._answered(lambda: self.run.store.call(report))
            return
        assert all(bytes(body or b"") == BODY for body in bodies)
        await self._answered(lambda: self.run.commit(self._step))
        await self._answered(lambda: self.run.checkpoint(self._step))
        self._step += 1
        with contextlib.suppress(RolloutBufferError):
            self.paused.add((await self.run.view()).paused)

    async def balance(self) -> dict[str, int]:
        """The ledger, which balances; checks that no acknowledged group is missing in it."""
        ledger = await self.run.ledger()
        amounts = dict(ledger)
        assert amounts.pop("accepted") == sum(amounts.values()), ledger
        assert set(amounts) <= {"trained", "queued", "delivered", "lost"}, ledger
        assert ledger["accepted"] >= self.acknowledged
        return ledger
