"""The trainer of a history: incarnations, each with its ranks and its feeder, that crash at any moment and are resumed.

An incarnation trains until the plan is fulfilled and everything that was begun is finished: then no task is open, and
fewer groups than ranks are left in the queue.
"""

import asyncio
import itertools
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from buffer_wire.errors import (
    CursorConflict,
    NotCommitted,
    PendingFull,
    ReplayGap,
    RolloutBufferError,
    RunPaused,
    StepAhead,
    VersionConflict,
)
from tests.faults.calls import OPTIONS, Caller, manifest
from tests.faults.history import History, gather_or_cancel
from tests.faults.looks import look, pause
from trainer_client import AsyncBufferClient, Batch
from trainer_client.state import Resumed, RunState

PREFETCH = 1
BATCH_GROUPS = 6
"""Divisible by every world size."""
WORLD_SIZES = (2, 3)
TOLD = (RunPaused, StepAhead, CursorConflict, NotCommitted)
"""Errors that a trainer may hear of a store that has forgotten something; a client that has seen nothing hears the
last.
"""


@dataclass
class Plan:
    """Goal of a history: enough is after so many steps, crashes and, as `struck` says, strikes."""

    steps: int
    crashes: int
    struck: Callable[[], bool]
    last_step: int | None = None
    """Once there is enough: steps from this one on are as small as can be, so that nothing waits for more prompts."""

    def look(self, trained: int, begun: int, crashes: int) -> None:
        if self.last_step is None and trained >= self.steps and crashes >= self.crashes and self.struck():
            self.last_step = begun + 1

    def is_small(self, step: int) -> bool:
        return self.last_step is not None and step >= self.last_step


@dataclass
class Trainer:
    """State of a trainer that outlives its processes."""

    run_id: str
    history: History
    rng: random.Random
    target: Callable[[], str]
    plan: Plan
    crashes: int = 0
    incarnations: int = 0
    saved_step: int = 0
    """Step before which its own checkpoint holds everything."""
    trained: int = 0
    view: RunState | None = None
    """View as last seen by the observer."""
    may_lose: bool = False
    """True where the store may lose what it has acknowledged: the trainer is told, and resumes."""

    term: int | None = None
    """Term of the present incarnation; None: there was none yet."""

    async def run(self) -> None:
        """Train to the end of the plan."""
        start, world_size = await self._take_over(told=False)
        while True:
            incarnation = asyncio.create_task(_Incarnation(self, start, world_size).run())
            crash = asyncio.create_task(self._crash_time())
            try:
                await asyncio.wait({incarnation, crash}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await gather_or_cancel(crash)
                finished = incarnation.done() and not incarnation.cancelled() and incarnation.exception() is None
                told = await self._ended(incarnation)
            if finished:
                return
            if not told:
                self.crashes += 1
                self.history.note("trainer", "crash")
            start, world_size = await self._take_over(told=told)

    def keep(self) -> None:
        """Keep what the next process has to know; called before the service is told of it."""

    async def _take_over(self, *, told: bool) -> tuple[Resumed, int]:
        """Resume, where there was an incarnation before; `told`: it ended because the store has lost something."""
        zombie = self.term
        if zombie is None:
            start, world_size = await self._resume(0, "replay")
        elif told:
            # The store may know less than the trainer's own checkpoint.
            start, world_size = await self._resume(None, self._mode())
            self.saved_step = min(self.saved_step, start.next_step)
        else:
            k = self.rng.choice([None, self.rng.randint(self.saved_step, max(self.saved_step, self.trained))])
            start, world_size = await self._resume(k, self._mode())
        self.term = start.term
        self.keep()
        if zombie is not None:
            await self._haunt(zombie, start)
        return start, world_size

    async def _ended(self, incarnation: "asyncio.Task[None]") -> bool:
        """Cancel it; True when it ended because it was told that the store has lost something, False for a crash."""
        told = TOLD if self.may_lose else ()
        try:
            await gather_or_cancel(incarnation)
        except BaseExceptionGroup as group:
            if group.split(told)[1] is not None:
                raise
            return True
        return False

    async def _crash_time(self) -> None:
        if self.crashes >= self.plan.crashes:
            await asyncio.Event().wait()
        await self.history.passed(self.rng.randint(150, 450))

    def _mode(self) -> Any:
        return self.rng.choices(["replay", "requeue", "discard"], [5, 3, 2])[0]

    async def _resume(self, next_step: int | None, mode: Any) -> tuple[Resumed, int]:
        self.incarnations += 1
        world_size = self.rng.choice(WORLD_SIZES)
        async with (
            AsyncBufferClient(self.target(), OPTIONS) as client,
            self.history.call("trainer", "resume", next_step=next_step, mode=mode) as op,
        ):
            start = await client.resume(self.run_id, next_step=next_step, mode=mode)
            op.reply = {
                "term": start.term,
                "next_step": start.next_step,
                "next_unassembled_step": start.next_unassembled_step,
                "version": start.version,
                "cursor": start.cursor,
                "feeder_state": start.feeder_state.decode(),
            }
        self.trained = start.next_step
        return start, world_size

    async def _haunt(self, term: int, now: Resumed) -> None:
        """Go on with calls, as what is left of the former trainer."""
        async with AsyncBufferClient(self.target(), OPTIONS) as client:
            caller = Caller(self.history, self.run_id, client, "zombie", term)
            step = now.next_step
            calls = (
                caller.pull(step, 0, 0, 2, now.version, None),
                caller.publish(now.version + 1, manifest("zombie", now.version + 1), None),
                caller.submit(now.cursor, 1),
                caller.commit(step),
                caller.checkpoint(step),
            )
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(outcome, BaseException) and not isinstance(outcome, RolloutBufferError):
                    raise outcome


@dataclass
class _Incarnation:
    """One trainer process with its ranks, from its resume to its end."""

    trainer: Trainer
    start: Resumed
    world_size: int
    published: int = field(init=False)
    got: dict[int, int] = field(init=False)
    """Steps by rank: every step before this one has arrived."""

    def __post_init__(self) -> None:
        self.history, self.rng, self.plan = self.trainer.history, self.trainer.rng, self.trainer.plan
        self.got = dict.fromkeys(range(self.world_size), self.start.next_step)
        self.published = self.start.next_step

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            others = [tasks.create_task(self._rank(rank)) for rank in range(self.world_size)]
            others += [tasks.create_task(self._feed()), tasks.create_task(self._look_around())]
            await self._train()
            for task in others:
                task.cancel()

    def _client(self) -> AsyncBufferClient:
        return AsyncBufferClient(self.trainer.target(), OPTIONS)

    # ── ranks ────────────────────────────────────────────────────────────────

    async def _rank(self, rank: int) -> None:
        async with self._client() as client:
            caller = Caller(self.history, self.trainer.run_id, client, f"rank-{rank}", self.start.term)
            for step in itertools.count(self.start.next_step):
                await self.history.until(
                    lambda step=step: step <= self.published + PREFETCH,  # type: ignore[misc]
                    f"step {step - PREFETCH} is trained",
                )
                await self._pull_step(caller, rank, step)
                self.got[rank] = step + 1
                self.history.tick()
                if self.rng.random() < 0.25:
                    await self._ask_again(step)

    async def _pull_step(self, caller: Caller, rank: int, step: int) -> list[Batch]:
        micro_batches: list[Batch] = []
        while not micro_batches or not micro_batches[-1].final:
            version = groups = None
            if not micro_batches:
                version = self.start.version + step - self.start.next_step
                groups = self.world_size if self.plan.is_small(step) else None
                if step < self.start.next_unassembled_step:
                    version = None
            micro_batches.append(await caller.pull(step, len(micro_batches), rank, self.world_size, version, groups))
        return micro_batches

    async def _ask_again(self, newest: int) -> None:
        """Somebody else asks for a step that was pulled before, for any rank."""
        step = self.rng.randint(min(self.trainer.saved_step, newest), newest)
        async with self._client() as client:
            caller = Caller(self.history, self.trainer.run_id, client, "bystander", self.start.term)
            try:
                await self._pull_step(caller, self.rng.randrange(self.world_size), step)
            except ReplayGap:
                assert step < self.trainer.saved_step or self.trainer.may_lose

    # ── training ─────────────────────────────────────────────────────────────

    async def _train(self) -> None:
        async with self._client() as client:
            caller = Caller(self.history, self.trainer.run_id, client, "trainer", self.start.term)
            for step in itertools.count(self.start.next_step):
                await self.history.until(
                    lambda step=step: min(self.got.values()) > step or self._is_finished(step),  # type: ignore[misc]
                    f"every rank of {self.got} has step {step}",
                )
                if min(self.got.values()) <= step:
                    return
                await self._publish(caller, step)
                self.published = self.trainer.trained = step + 1
                self.plan.look(step + 1, max(self.got.values()) + 1, self.trainer.crashes)
                self.trainer.keep()
                self.history.tick()
                if self.rng.random() < 0.2:
                    self.trainer.saved_step = step + 1
                    self.trainer.keep()
                    await caller.checkpoint(step)

    async def _publish(self, caller: Caller, step: int) -> None:
        version = self.start.version + step + 1 - self.start.next_step
        if self.rng.random() < 0.2:
            await caller.commit(step)
        await caller.publish(version, manifest("weights", version), step)
        if self.rng.random() < 0.2:
            await caller.publish(version, manifest("weights", version), step)
        if self.rng.random() < 0.1:
            with suppress(VersionConflict):
                await caller.publish(version, manifest("others", version), step)

    def _is_finished(self, step: int) -> bool:
        view = self.trainer.view
        if view is None or not self.plan.is_small(step) or view.next_step != step or set(self.got.values()) != {step}:
            return False
        tasks, groups = view.ledger.tasks, view.ledger.groups
        return tasks.pending + tasks.leased + groups.forming.groups == 0 and groups.queued.groups < self.world_size

    async def _look_around(self) -> None:
        """Look at the run, as sessions do, by the client that it also writes with."""
        async with self._client() as client:
            caller = Caller(self.history, self.trainer.run_id, client, "looker", self.start.term)
            while True:
                await pause(self.history)
                await look(self.history, client, self.trainer.run_id)
                if self.published > self.start.next_step:
                    await caller.commit(self.published - 1)

    # ── feeding ──────────────────────────────────────────────────────────────

    async def _feed(self) -> None:
        cursor = self.start.cursor
        async with self._client() as client, self._client() as other:
            caller = Caller(self.history, self.trainer.run_id, client, "feeder", self.start.term)
            rival = Caller(self.history, self.trainer.run_id, other, "rival", self.start.term)
            while not self.plan.is_small(self.published):
                callers = [caller, rival] if self.rng.random() < 0.15 else [caller]
                count = self.rng.randint(1, 6)
                submits = [it.submit(cursor, count) for it in callers]
                outcomes: list[int | BaseException] = await asyncio.gather(*submits, return_exceptions=True)
                if all(isinstance(outcome, CursorConflict) for outcome in outcomes):
                    raise outcomes[0]  # type: ignore[misc]
                for outcome in outcomes:
                    if isinstance(outcome, int):
                        cursor = outcome
                    elif isinstance(outcome, PendingFull):
                        await self.history.passed(30)
                    elif not isinstance(outcome, CursorConflict):
                        raise outcome
