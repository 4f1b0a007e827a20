"""Seats of a worker: everything that drives an engine, put together, and the lists of what is at work.

Invariant: the lists `slots`, `drivers`, `dispatchers` and `keepers` are always those of the engines at work.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rollout_workers.engine.hosts import EngineHost
from rollout_workers.engine.types import PauseMode
from rollout_workers.fleet.fleet import Seat
from rollout_workers.fleet.guard import EngineGuard
from rollout_workers.fleet.reporter import Reporter
from rollout_workers.options import WorkerOptions
from rollout_workers.service.client import ServiceClient
from rollout_workers.slots.breaker import Breaker
from rollout_workers.slots.inflight import InflightLimit
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.tasks.dispatcher import Dispatcher
from rollout_workers.tasks.drivers import Driver, Together
from rollout_workers.tasks.evaluation_target import EvaluationTarget
from rollout_workers.tasks.evaluator import Evaluator
from rollout_workers.tasks.keeper import LeaseKeeper
from rollout_workers.tasks.tools import Tools
from rollout_workers.weights.fetching.fetcher import WeightFetcher
from rollout_workers.weights.loader import WeightLoader
from rollout_workers.weights.permits import Permits
from rollout_workers.weights.watcher import WeightWatcher


@dataclass(frozen=True, slots=True)
class Shared:
    """Parts that all engines of the worker have in common."""

    service: ServiceClient
    tools: Tools
    evaluating: Tools
    """Tools for the work of evaluations: their results and counts go apart."""
    watcher: WeightWatcher
    fetcher: WeightFetcher
    slots: list[EngineSlot]
    """Slots of all engines at work."""
    weights_url: str
    """URL at which the worker serves its weights to others; empty: it does not."""


class Seats:
    """Seats of the engines at work."""

    def __init__(self, options: WorkerOptions, shared: Shared) -> None:
        self._options = options
        self._shared = shared
        self.drivers: list[Driver] = []
        self.dispatchers: list[Dispatcher] = []
        """Dispatchers of the engines that make groups to train on."""
        self.keepers: list[LeaseKeeper] = []
        """Keepers of the same engines' leases, in the same order."""

    def seat(self, slot: EngineSlot, host: EngineHost) -> Seat:
        """Seat of an engine, with everything that drives it."""
        options, shared = self._options, self._shared
        slot.breaker = Breaker(options.breaker_failures)
        slot.weights_url = shared.weights_url
        keeper = LeaseKeeper(slot.engine_id, shared.service)
        guard = EngineGuard(slot, host, shared.slots, timeout_s=options.engine_timeout_s)
        if options.evaluations == "only":
            target = EvaluationTarget(shared.service)
            slot.hold = evaluator = self._evaluator(slot, keeper, target=target)
            self.drivers.append(evaluator)
            loader = self._loader(slot, target, Permits(slot, target, unlimited=True))
            return Seat(slot, host, keeper, evaluator, [keeper.run(), loader.run(), guard.run()], is_reported=False)
        slot.limit = limit = InflightLimit(slot, options.groups_per_engine, kv_target=options.kv_target)
        dispatcher = Dispatcher(
            slot,
            shared.service,
            keeper,
            shared.tools,
            limit=limit,
            lease_wait_s=options.lease_wait_s,
            peers=self.dispatchers,
        )
        driver: Driver = dispatcher
        if options.evaluations == "also":
            slot.hold = evaluator = self._evaluator(slot, keeper, on_change=dispatcher.look_again)
            driver = Together(dispatcher, evaluator)
        self.keepers.append(keeper)
        self.dispatchers.append(dispatcher)
        self.drivers.append(driver)
        permits = Permits(slot, shared.watcher)
        loader = self._loader(slot, shared.watcher, permits)
        reporter = Reporter(slot, shared.service, shared.watcher, permits, options.worker_id)
        return Seat(slot, host, keeper, driver, [keeper.run(), loader.run(), guard.run(), reporter.run(), limit.run()])

    def forget(self, seat: Seat) -> None:
        """Strike an engine that has left from the lists."""
        self._shared.slots.remove(seat.slot)
        self.drivers.remove(seat.driver)
        if seat.keeper in self.keepers:
            at = self.keepers.index(seat.keeper)
            del self.keepers[at], self.dispatchers[at]
        self._shared.fetcher.release(seat.slot.engine_id)

    def _loader(self, slot: EngineSlot, target: WeightWatcher, permits: Permits) -> WeightLoader:
        options = self._options
        return WeightLoader(
            slot,
            target,
            self._shared.fetcher,
            permits,
            pause_mode=PauseMode(options.pause_mode),
            timeout_s=options.reload_timeout_s,
            weightless=options.simulated is not None,
            traces=self._shared.tools.traces,
        )

    def _evaluator(
        self,
        slot: EngineSlot,
        keeper: LeaseKeeper,
        *,
        on_change: Callable[[], None] | None = None,
        target: EvaluationTarget | None = None,
    ) -> Evaluator:
        options = self._options
        return Evaluator(
            slot,
            self._shared.service,
            keeper,
            self._shared.evaluating,
            concurrency=options.groups_per_engine,
            hold_s=options.evaluation_hold_s,
            lease_wait_s=options.lease_wait_s,
            on_change=on_change,
            target=target,
        )
