"""A rollout worker put together: its parts, their start, and an end in good order.

`run` reads top to bottom: open the engines, start the parts, work until told to stop, drain, close.

Draining, within `drain_grace_s`: nothing more is leased; engines end their requests and partial work goes back with its
continuation; groups that are made are scored and pushed; what has no answer after a moment goes back too.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any

import structlog

from buffer_wire.errors import InvalidField, RolloutBufferError
from rollout_workers.counters import Counters
from rollout_workers.dispatcher import Dispatcher
from rollout_workers.engine.types import PauseMode
from rollout_workers.engines import EngineHost, hosts_of, open_engines
from rollout_workers.functions import is_coroutine, rollout_of
from rollout_workers.guard import EngineGuard
from rollout_workers.keeper import LeaseKeeper, hurry_after_publishes
from rollout_workers.options import WorkerOptions
from rollout_workers.progress import Progress
from rollout_workers.prompts import Prompts
from rollout_workers.pusher import Pusher
from rollout_workers.reporter import Reporter, report_all
from rollout_workers.reward_processes import RewardProcesses
from rollout_workers.rewards import RewardFunction, Scorer, load_reward, no_reward
from rollout_workers.service import ServiceClient
from rollout_workers.slot import EngineSlot
from rollout_workers.weights.fetcher import WeightFetcher
from rollout_workers.weights.loader import WeightLoader
from rollout_workers.weights.watcher import WeightWatcher
from rollout_workers.work import Stage, Tools

OUTSTANDING_PER_SLOT = 4
"""Leases held for each group on an engine: room for those being scored and pushed."""

_ANSWERS_S = 2.0
"""How long a drain waits for answers to pushes. A full queue may not answer at all, and what goes back is not lost: its
finished samples are kept."""

_log = structlog.get_logger()


class Worker:
    """One worker process. `reward` and `hosts` default to what the options name."""

    def __init__(
        self,
        options: WorkerOptions,
        *,
        reward: RewardFunction | None = None,
        hosts: Sequence[EngineHost] | None = None,
    ) -> None:
        self.options = options
        self.counters = Counters()
        self.slots: list[EngineSlot] = []
        self._reward = reward or (load_reward(options.reward) if options.reward else no_reward)
        if options.reward_processes and is_coroutine(self._reward):
            raise InvalidField("reward_processes", options.reward_processes, "0 where the reward function is a coroutine")
        self._rollout = rollout_of(options)
        self._hosts = hosts if hosts is not None else hosts_of(options)
        self._stop = asyncio.Event()
        self._dispatchers: list[Dispatcher] = []

    def stop(self) -> None:
        """Begin to drain. For use within the event loop, as from a signal handler."""
        self._stop.set()

    @property
    def stopping(self) -> bool:
        """True once `stop` was called."""
        return self._stop.is_set()

    async def run(self) -> None:
        """Work until `stop`. Raises the error of the part that could not go on, in an ExceptionGroup."""
        options = self.options
        service = ServiceClient(
            options.address, options.run_id, instance_id=uuid.uuid4().hex, timeout_s=options.service_timeout_s
        )
        fetcher = WeightFetcher(
            options.weights_dir / options.run_id, owner=options.worker_id, keep=options.keep_versions
        )
        try:
            fetcher.sweep()
            async with open_engines(self._hosts, options.worker_id) as slots:
                self.slots = slots
                _log.info(
                    "engines ready",
                    engines=[f"{slot.engine_id} {slot.info.address} {slot.loaded}" for slot in slots],
                )
                await self._work(service, fetcher, slots)
        finally:
            await fetcher.close()
            await service.close()

    async def _work(self, service: ServiceClient, fetcher: WeightFetcher, slots: list[EngineSlot]) -> None:
        options = self.options
        prompts = Prompts(options.tokenizer or _tokenizer_of(slots))
        scorer = Scorer(
            self._reward,
            prompts,
            name=options.reward,
            timeout_s=options.reward_timeout_s,
            threads=options.reward_threads,
            decode=options.tokenizer is not None,
            processes=RewardProcesses(
                options.reward, count=options.reward_processes, timeout_s=options.reward_timeout_s
            )
            if options.reward_processes
            else None,
        )
        pusher = Pusher(service, self.counters, bundle_bytes=options.bundle_bytes, bundle_wait_s=options.bundle_wait_s)
        tools = Tools(
            options.worker_id,
            prompts,
            scorer,
            pusher,
            self.counters,
            options.generate_timeout_s,
            options.max_sample_attempts,
            self._rollout,
        )
        watcher = WeightWatcher(service)
        parts: list[Coroutine[Any, Any, None]] = [watcher.run(), pusher.run()]
        keepers = [LeaseKeeper(slot.engine_id, service) for slot in slots]
        parts.append(hurry_after_publishes(watcher, keepers))
        for slot, host, keeper in zip(slots, self._hosts, keepers, strict=True):
            self._dispatchers.append(
                Dispatcher(
                    slot,
                    service,
                    keeper,
                    tools,
                    concurrency=options.groups_per_engine,
                    outstanding=options.groups_per_engine * OUTSTANDING_PER_SLOT,
                    lease_wait_s=options.lease_wait_s,
                )
            )
            loader = WeightLoader(
                slot,
                watcher,
                fetcher,
                pause_mode=PauseMode(options.pause_mode),
                timeout_s=options.reload_timeout_s,
                weightless=options.simulated is not None,
            )
            guard = EngineGuard(slot, host, slots, timeout_s=options.engine_timeout_s)
            reporter = Reporter(slot, service, options.worker_id)
            parts += [keeper.run(), loader.run(), guard.run(), reporter.run()]
        if options.progress_every_s:
            progress = Progress(self.counters, slots, self._dispatchers, pusher, every_s=options.progress_every_s)
            parts.append(progress.run())
        needs = self._rollout.running() if self._rollout is not None else contextlib.nullcontext()
        try:
            async with needs, asyncio.TaskGroup() as group:
                background = [group.create_task(part) for part in parts]
                working = [group.create_task(dispatcher.run()) for dispatcher in self._dispatchers]
                await self._stop.wait()
                await self._drain(working)
                await self._say_stopped(service)
                for task in background:
                    task.cancel()
        finally:
            await scorer.close()

    async def _drain(self, working: Sequence[asyncio.Task[None]]) -> None:
        began, grace_s = time.monotonic(), self.options.drain_grace_s
        _log.info("draining", leases=sum(d.held for d in self._dispatchers), grace_s=grace_s)

        def left(share: float) -> float:
            return max(began + share * grace_s - time.monotonic(), 0.0)

        for dispatcher in self._dispatchers:
            dispatcher.stop()
        await asyncio.wait(working, timeout=min(_ANSWERS_S, left(0.7)))
        for dispatcher in self._dispatchers:
            dispatcher.cut(Stage.PUSHING)
        await asyncio.wait(working, timeout=left(0.7))
        for dispatcher in self._dispatchers:
            dispatcher.cut(*Stage)
        await asyncio.wait(working, timeout=left(0.9))
        held = sum(dispatcher.held for dispatcher in self._dispatchers)
        for task in working:
            task.cancel()
        if held:
            _log.error("leases left to expire", leases=held, why="the service did not take them back in time")

    async def _say_stopped(self, service: ServiceClient) -> None:
        for slot in self.slots:
            slot.stopped = True
        try:
            await report_all(self.slots, service, self.options.worker_id, timeout_s=1.0)
        except RolloutBufferError as error:
            _log.warning("last report failed", error=str(error))


def _tokenizer_of(slots: Sequence[EngineSlot]) -> str | None:
    return next((slot.base_model or slot.info.model_path or None for slot in slots), None)
