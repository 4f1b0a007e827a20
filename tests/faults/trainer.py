"""The trainer of a history: incarnations, each with its ranks and its feeder, that crash at any moment and are resumed.

An incarnation trains until the plan is fulfilled and everything that was begun is finished: then no task is open, and
fewer groups than ranks are left in the queue.
"""

import asyncio
import itertools
import json
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
from tests.faults.history import Facts, History, gather_or_cancel
from tests.faults.looks import look, pause
from tests.faults.made_groups import GROUP_SIZE, PROMPT, digest
from trainer_client import AsyncBufferClient, Batch, ClientOptions, FilesManifest, SamplingParams, Task
from trainer_client.manifest import WeightFile
from trainer_client.requests import Submission
from trainer_client.state import Resumed, RunState

PREFETCH = 1
BATCH_GROUPS = 6
"""Divisible by every world size."""
WORLD_SIZES = (2, 3)
PULL_TIMEOUT_S = 45.0
OPTIONS = ClientOptions(timeout_s=45.0, attempt_timeout_s=5.0, transfer_timeout_s=5.0)
TOLD = (RunPaused, StepAhead, CursorConflict, NotCommitted)
"""What a trainer may hear of a store that has forgotten something; a client that has seen nothing hears the last."""
SAMPLING = SamplingParams(max_new_tokens=16)


@dataclass
class Plan:
    """When there is enough: after so many steps, crashes and, as `struck` says, strikes."""

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
    """What outlives its incarnations."""

    run_id: str
    history: History
    rng: random.Random
    target: Callable[[], str]
    plan: Plan
    crashes: int = 0
    incarnations: int = 0
    saved_step: int = 0
    """What its own checkpoint holds: everything before this step."""
    trained: int = 0
    view: RunState | None = None
    """As last seen by the observer."""
    may_lose: bool = False
    """True where the store may lose what it has acknowledged: the trainer is told, and resumes."""

    async def run(self) -> None:
        """Train to the end of the plan."""
        start, world_size = await self._resume(0, "replay")
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
            zombie = start.epoch
            if told:
                # The store may know less than the trainer's own checkpoint.
                start, world_size = await self._resume(None, self._mode())
                self.saved_step = min(self.saved_step, start.next_step)
            else:
                k = self.rng.choice([None, self.rng.randint(self.saved_step, max(self.saved_step, self.trained))])
                start, world_size = await self._resume(k, self._mode())
            await self._haunt(zombie, start)

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
                "epoch": start.epoch,
                "next_step": start.next_step,
                "next_unassembled_step": start.next_unassembled_step,
                "version": start.version,
                "cursor": start.cursor,
                "feeder_state": start.feeder_state.decode(),
            }
        self.trained = start.next_step
        return start, world_size

    async def _haunt(self, epoch: int, now: Resumed) -> None:
        """What is left of the former trainer goes on with its calls."""
        async with AsyncBufferClient(self.target(), OPTIONS) as client:
            caller = Caller(self, client, "zombie", epoch)
            step = now.next_step
            calls = (
                caller.pull(step, 0, 0, 2, now.version, None),
                caller.publish(now.version + 1, _manifest("zombie", now.version + 1), None),
                caller.submit(now.cursor, 1),
                caller.commit(step),
                caller.checkpoint(step),
            )
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(outcome, BaseException) and not isinstance(outcome, RolloutBufferError):
                    raise outcome


@dataclass
class Caller:
    """One client of one epoch, every call of which is recorded."""

    trainer: Trainer
    client: AsyncBufferClient
    name: str
    epoch: int

    def _call(self, kind: str, **given: Any) -> Any:
        return self.trainer.history.call(self.name, kind, epoch=self.epoch, **given)

    async def pull(
        self, step: int, round_: int, rank: int, world_size: int, train_version: int | None, groups: int | None
    ) -> Batch:
        where = {"step": step, "round": round_, "rank": rank, "world_size": world_size}
        async with self._call("pull", **where, train_version=train_version, batch_groups=groups) as op:
            batch = await self.client.pull(
                self.trainer.run_id,
                epoch=self.epoch,
                step=step,
                rank=rank,
                world_size=world_size,
                train_version=train_version,
                round=round_,
                batch_groups=groups,
                timeout_s=PULL_TIMEOUT_S,
            )
            op.reply = _batch_facts(batch)
        return batch

    async def publish(self, version: int, manifest: FilesManifest, commit_through: int | None) -> None:
        given = {
            "version": version,
            "manifest": manifest.base_url,
            "commit_through": commit_through,
        }
        async with self._call("publish", **given) as op:
            done = await self.client.publish(
                self.trainer.run_id,
                epoch=self.epoch,
                version=version,
                manifest=manifest,
                commit_through=commit_through,
            )
            op.reply = {
                "published": [done.version.epoch, done.version.version],
                "committed_steps": done.committed_steps,
            }

    async def commit(self, through: int) -> None:
        async with self._call("commit", through=through) as op:
            steps = await self.client.commit(self.trainer.run_id, epoch=self.epoch, through_step=through)
            op.reply = {"committed_steps": steps}

    async def checkpoint(self, through: int) -> None:
        async with self._call("checkpoint", through=through) as op:
            steps = await self.client.checkpoint(self.trainer.run_id, epoch=self.epoch, through_step=through)
            op.reply = {"checkpointed_steps": steps}

    async def submit(self, cursor: int, count: int) -> int:
        """Feed so many prompts from `cursor` on; the cursor after them."""
        items = list(range(cursor, cursor + count))
        submission = Submission(
            epoch=self.epoch,
            expected_cursor=cursor,
            cursor=cursor + count,
            feeder_state=str(cursor + count).encode(),
            tasks=[
                Task(
                    group_size=GROUP_SIZE,
                    sampling=SAMPLING,
                    prompt_token_ids=[1] * PROMPT,
                    environment=("sums", "words")[item % 2],
                    metadata={"item": item},
                )
                for item in items
            ],
        )
        async with self._call("submit", expected_cursor=cursor, cursor=cursor + count) as op:
            done = await self.client.submit_tasks(self.trainer.run_id, submission, on_wait=_not_if_full)
            op.reply = {"cursor": done.cursor, "task_ids": list(done.task_ids)}
        return done.cursor


def _not_if_full(waiting: Any) -> None:
    if isinstance(waiting.error, PendingFull):
        raise waiting.error


@dataclass
class _Incarnation:
    """One trainer process with its ranks, from its resume to its end."""

    trainer: Trainer
    start: Resumed
    world_size: int
    published: int = field(init=False)
    got: dict[int, int] = field(init=False)
    """By rank: every step before this one has arrived."""

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
            caller = Caller(self.trainer, client, f"rank-{rank}", self.start.epoch)
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
        rounds: list[Batch] = []
        while not rounds or not rounds[-1].final:
            version = groups = None
            if not rounds:
                version = self.start.version + step - self.start.next_step
                groups = self.world_size if self.plan.is_small(step) else None
                if step < self.start.next_unassembled_step:
                    version = None
            rounds.append(await caller.pull(step, len(rounds), rank, self.world_size, version, groups))
        return rounds

    async def _ask_again(self, newest: int) -> None:
        """Somebody else asks for a step that was pulled before, for any rank."""
        step = self.rng.randint(min(self.trainer.saved_step, newest), newest)
        async with self._client() as client:
            caller = Caller(self.trainer, client, "bystander", self.start.epoch)
            try:
                await self._pull_step(caller, self.rng.randrange(self.world_size), step)
            except ReplayGap:
                assert step < self.trainer.saved_step or self.trainer.may_lose

    # ── training ─────────────────────────────────────────────────────────────

    async def _train(self) -> None:
        async with self._client() as client:
            caller = Caller(self.trainer, client, "trainer", self.start.epoch)
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
                self.history.tick()
                if self.rng.random() < 0.2:
                    self.trainer.saved_step = step + 1
                    await caller.checkpoint(step)

    async def _publish(self, caller: Caller, step: int) -> None:
        version = self.start.version + step + 1 - self.start.next_step
        if self.rng.random() < 0.2:
            await caller.commit(step)
        await caller.publish(version, _manifest("weights", version), step)
        if self.rng.random() < 0.2:
            await caller.publish(version, _manifest("weights", version), step)
        if self.rng.random() < 0.1:
            with suppress(VersionConflict):
                await caller.publish(version, _manifest("others", version), step)

    def _is_finished(self, step: int) -> bool:
        view = self.trainer.view
        if view is None or not self.plan.is_small(step) or view.next_step != step or set(self.got.values()) != {step}:
            return False
        tasks, groups = view.ledger.tasks, view.ledger.groups
        return tasks.pending + tasks.leased + groups.forming.groups == 0 and groups.queued.groups < self.world_size

    async def _look_around(self) -> None:
        """As sessions do, the trainer looks at its run by the client that it also writes with."""
        async with self._client() as client:
            caller = Caller(self.trainer, client, "looker", self.start.epoch)
            while True:
                await pause(self.history)
                await look(self.history, client, self.trainer.run_id)
                if self.published > self.start.next_step:
                    await caller.commit(self.published - 1)

    # ── feeding ──────────────────────────────────────────────────────────────

    async def _feed(self) -> None:
        cursor = self.start.cursor
        async with self._client() as client, self._client() as other:
            caller = Caller(self.trainer, client, "feeder", self.start.epoch)
            rival = Caller(self.trainer, other, "rival", self.start.epoch)
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


def _manifest(folder: str, version: int) -> FilesManifest:
    return FilesManifest(f"/{folder}/{version}", (WeightFile("model", 4, bytes(32)),))


def _batch_facts(batch: Batch) -> Facts:
    info = batch.info
    return {
        "final": info.final,
        "train_version": info.train_version,
        "replayed": info.replayed,
        "staleness_max": info.staleness_max,
        "totals": [info.total_groups, info.total_samples, info.total_tokens, info.total_loss_tokens],
        "shard": [info.shard_groups, info.shard_tokens],
        "groups": [
            {
                "group_id": f"{group.task_id}/{group.generation}",
                "digest": digest(group.header, group.payload),
                "sequence": group.sequence,
                "head": group.head_version,
                "item": json.loads(group.header.metadata_json)["item"],
            }
            for group in batch.groups
        ],
    }
