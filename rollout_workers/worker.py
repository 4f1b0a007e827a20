"""A rollout worker put together: its parts, their start, and an end in good order.

`run` reads top to bottom: open the engines, start the parts, work until told to stop, drain, close.

Draining, within `drain_grace_s`: nothing more is leased; engines end their requests and partial work goes back with its
partial rollout; groups that are made are scored and pushed; what has no answer after a moment goes back too.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from buffer_wire.errors import InvalidField, RolloutBufferError
from buffer_wire.payloads.writer import PayloadWriter
from rollout_workers.counters import Counters
from rollout_workers.engine.hosts import EngineHost
from rollout_workers.engines import hosts_of, open_engines, open_slot
from rollout_workers.fleet.fleet import Fleet
from rollout_workers.fleet.metrics import WorkerCollector, metrics_server
from rollout_workers.fleet.reporter import report_all
from rollout_workers.fleet.router import RouterClient, RouterWatch, first_ready
from rollout_workers.fleet.seats import Seats, Shared
from rollout_workers.functions import Rollout, is_coroutine, rollout_of
from rollout_workers.generation.images import Images
from rollout_workers.generation.limits import Limits, LimitsOfTasks, parsed
from rollout_workers.generation.prompts import Prompts
from rollout_workers.generation.spread import Spread
from rollout_workers.options import WorkerOptions
from rollout_workers.rewarding.processes import RewardProcesses
from rollout_workers.rewards import RewardFunction, Scorer, load_reward, no_reward
from rollout_workers.service.client import ServiceClient
from rollout_workers.service.pusher import Pusher
from rollout_workers.slots.engine_state import Event
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.tasks.keeper import hurry_after_publishes
from rollout_workers.tasks.progress import Progress
from rollout_workers.tasks.tools import Tools
from rollout_workers.tasks.work import Stage
from rollout_workers.tracing.run import WorkerTraces
from rollout_workers.weights.fetching.fetcher import WeightFetcher
from rollout_workers.weights.fetching.peers import ReportedPeers
from rollout_workers.weights.server import server_of
from rollout_workers.weights.transfer.client import WeightClient
from rollout_workers.weights.watcher import WeightWatcher

_ANSWERS_S = 2.0
"""Longest wait of a drain for answers to pushes. A full queue may not answer at all. What goes back is not lost: its
finished samples are kept."""

_log = structlog.get_logger()


class Worker:
    """Worker process. `reward`, `rollout` and `hosts` default to what the options name."""

    def __init__(
        self,
        options: WorkerOptions,
        *,
        reward: RewardFunction | None = None,
        rollout: Rollout | None = None,
        hosts: Sequence[EngineHost] | None = None,
    ) -> None:
        self.options = options
        self.counters = Counters()
        self.evaluated = Counters()
        """Counters of evaluations; `counters` knows nothing of them."""
        self.slots: list[EngineSlot] = []
        self.metrics_url = ""
        """URL of the worker's own metrics while they are served; empty: they are not."""
        self._reward = reward or (load_reward(options.reward) if options.reward else no_reward)
        if options.reward_processes and is_coroutine(self._reward):
            raise InvalidField("reward_processes", options.reward_processes, "0: the reward function is a coroutine")
        makes_rows = options.agent is not None and options.agent.branches == "rows"
        if makes_rows and options.reward and not getattr(self._reward, "rows", False):
            limit = f"refuse or last: the reward function {options.reward} does not say `rows = True`"
            raise InvalidField("agent_branches", "rows", limit)
        self._rollout = rollout or rollout_of(options)
        self._environment_limits = parsed(options.environment_limits)
        self._hosts = hosts if hosts is not None else hosts_of(options)
        self._stop = asyncio.Event()
        self._seats: Seats
        """Seats of the engines at work, from when these are open."""
        self._weights_url = ""
        self._engine_ids: dict[str, str] = {}
        """Ids of engines that a router lists, by URL: one that comes back is known by its old name."""

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
            options.address,
            options.run_id,
            instance_id=uuid.uuid4().hex,
            timeout_s=options.service_timeout_s,
            access=options.access,
        )
        peers = ReportedPeers(service)
        fetcher = WeightFetcher(
            options.weights_dir / options.run_id,
            owner=options.worker_id,
            keep=options.keep_versions,
            client=WeightClient(options.weights_access, max_mbps=options.weights_max_mbps),
            mirrors=options.weights_mirrors,
            peers=peers,
            prefer_peers=options.weights_prefer_peers,
        )
        server = server_of(options, fetcher.find)
        router = RouterClient(options.router) if options.router else None
        try:
            fetcher.sweep()
            if server is not None:
                await server.start()
                self._weights_url = peers.own_url = server.url
            if router is not None:
                first = await first_ready(router, options)
                self._engine_ids[first.url] = f"{options.worker_id}.e0"
                self._hosts = [first]
            async with open_engines(self._hosts, options.worker_id) as slots, self._metrics(slots):
                self.slots = slots
                _log.info(
                    "engines ready",
                    engines=[f"{slot.engine_id} {slot.info.address} {slot.loaded}" for slot in slots],
                )
                await self._work(service, fetcher, slots, router)
        finally:
            if router is not None:
                await router.close()
            if server is not None:
                await server.close()
            await fetcher.close()
            await service.close()

    @contextlib.asynccontextmanager
    async def _metrics(self, slots: Sequence[EngineSlot]) -> AsyncIterator[None]:
        """Serve metrics meanwhile, if the options say where."""
        options = self.options
        if not options.metrics_listen:
            yield
            return
        counters = {"training": self.counters, "evaluation": self.evaluated}
        collector = WorkerCollector(options.run_id, options.worker_id, counters, slots)
        server = metrics_server(options.metrics_listen, collector)
        await server.start()
        self.metrics_url = f"{server.url}/metrics"
        try:
            yield
        finally:
            await server.close()

    async def _work(
        self, service: ServiceClient, fetcher: WeightFetcher, slots: list[EngineSlot], router: RouterClient | None
    ) -> None:
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
        writer = (
            PayloadWriter(options.run_id, options.worker_id, partial(service.write_access, options.worker_id))
            if options.direct_payloads
            else None
        )
        pusher = Pusher(service, self.counters, writer, bundle_bytes=options.bundle_bytes)
        spread = Spread(self.slots, self.counters) if options.spread else None
        tools = Tools(
            options.worker_id,
            prompts,
            scorer,
            pusher,
            self.counters,
            LimitsOfTasks(
                Limits(options.generate_timeout_s, options.reward_timeout_s, options.max_sample_attempts),
                self._environment_limits,
            ),
            self._rollout,
            options.surplus_samples,
            spread,
            # A run's id does not begin with a dot, as this directory beside those of runs does.
            Images(options.weights_dir / ".images", service.read_blob, options.image_rules),
            traces := WorkerTraces.of_process(service, options.worker_id),
        )
        # Results have a stream of their own: a full queue, at which training groups wait, must not stop them.
        results = Pusher(service, self.evaluated, writer, bundle_bytes=options.bundle_bytes)
        evaluating = replace(tools, pusher=results, counters=self.evaluated)
        watcher = WeightWatcher(service)
        self._seats = Seats(
            options, Shared(service, tools, evaluating, watcher, fetcher, self.slots, self._weights_url)
        )
        parts: list[Coroutine[Any, Any, None]] = [watcher.run(), pusher.run(), results.run()]
        parts.append(hurry_after_publishes(watcher, self._seats.keepers))
        if spread is not None:
            parts.append(spread.run())
        if traces is not None:
            await traces.begin()
            parts.append(traces.follow())
        seats = [self._seats.seat(slot, host) for slot, host in zip(slots, self._hosts, strict=True)]
        if options.progress_every_s:
            progress = Progress(
                self.counters,
                slots,
                self._seats.drivers,
                pusher,
                every_s=options.progress_every_s,
                evaluated=self.evaluated,
            )
            parts.append(progress.run())
        needs = self._rollout.running() if self._rollout is not None else contextlib.nullcontext()
        try:
            async with needs, asyncio.TaskGroup() as group:
                background = [group.create_task(part) for part in parts]
                fleet = Fleet(group, service, options.worker_id)
                for seat in seats:
                    fleet.add(seat)
                if router is not None:
                    background.append(group.create_task(self._follow(router, fleet).run()))
                await self._stop.wait()
                await self._drain(fleet.working)
                await self._say_stopped(service)
                fleet.stop_parts()
                for task in background:
                    task.cancel()
        finally:
            if writer is not None:
                await writer.close()
            await scorer.close()
            await asyncio.gather(*(host.close() for host in self._hosts), return_exceptions=True)

    # ── engines that come and go ─────────────────────────────────────────────

    def _follow(self, router: RouterClient, fleet: Fleet) -> RouterWatch:
        by_url = {seat.slot.info.address: seat for seat in fleet.seats}

        async def add(url: str) -> None:
            engine_id = self._engine_ids.setdefault(url, f"{self.options.worker_id}.e{len(self._engine_ids)}")
            host = self.options.kind.hosts.host_at(url, self.options)
            try:
                slot = await open_slot(engine_id, host)
            except BaseException:
                await host.close()
                raise
            if self.stopping:
                await host.close()
                return
            _log.info("engine joins", engine=engine_id, address=url, loaded=slot.loaded.label)
            self._hosts = [*self._hosts, host]
            self.slots.append(slot)
            by_url[url] = self._seats.seat(slot, host)
            fleet.add(by_url[url])

        async def remove(url: str) -> None:
            seat = by_url[url]

            def gone() -> None:
                by_url.pop(url, None)
                self._seats.forget(seat)

            await fleet.remove(seat, grace_s=self.options.drain_grace_s, on_gone=gone)
            self._hosts = [host for host in self._hosts if host is not seat.host]

        return RouterWatch(router, lambda: set(by_url), add=add, remove=remove)

    async def _drain(self, working: Sequence[asyncio.Task[None]]) -> None:
        began, grace_s = time.monotonic(), self.options.drain_grace_s
        _log.info("draining", leases=sum(driver.held for driver in self._seats.drivers), grace_s=grace_s)

        def left(share: float) -> float:
            return max(began + share * grace_s - time.monotonic(), 0.0)

        for driver in self._seats.drivers:
            driver.stop()
        await asyncio.wait(working, timeout=min(_ANSWERS_S, left(0.7)))
        for driver in self._seats.drivers:
            driver.cut(Stage.PUSHING)
        await asyncio.wait(working, timeout=left(0.7))
        for driver in self._seats.drivers:
            driver.cut(*Stage)
        await asyncio.wait(working, timeout=left(0.9))
        held = sum(driver.held for driver in self._seats.drivers)
        for task in working:
            task.cancel()
        if held:
            _log.error("leases left to expire", leases=held, why="the service did not take them back in time")

    async def _say_stopped(self, service: ServiceClient) -> None:
        for slot in self.slots:
            slot.move(Event.STOPPED)
        if self.options.evaluations == "only":
            return
        try:
            await report_all(self.slots, service, self.options.worker_id, timeout_s=1.0)
        except RolloutBufferError as error:
            _log.warning("last report failed", error=str(error))


def _tokenizer_of(slots: Sequence[EngineSlot]) -> str | None:
    return next((slot.base_model or slot.info.model_path or None for slot in slots), None)
