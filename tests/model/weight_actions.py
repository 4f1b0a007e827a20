"""Actions of trainers and workers about weights, beyond publishing: plan collective updates, load in
turn, fall silent.
"""

import dataclasses

from buffer_service.domain import ops
from buffer_service.rules.totals import RELOAD_PHASES
from tests.model.drawing import Draw
from tests.model.notation import Entry
from tests.model.trainer_actions import TrainerActions
from tests.model.universe import COUNTERS, ENGINES, LOADERS, LOADING_STATES, PHASES
from tests.oracle.engines import FORGOTTEN_MS


class WeightActions(TrainerActions):
    """Each method is one action."""

    def plan(self, draw: Draw) -> None:
        """A plan, or the next phase of one, sometimes of a version that is not newer; now and then what ends it."""
        published = self.view.published.version
        version = max(0, published + draw.pick((1, 1, 1, 2, 3, 0, -1)))
        plan = ops.PlanCollective(self.term(draw), version, b"plan %d %s" % (version, draw.pick(PHASES)))
        for _ in range(2 if draw.rarely(4) else 1):
            self._announce(plan)
        if draw.rarely(3):
            self.publish(draw)
        elif draw.rarely(4):
            self.resume(draw)

    def _announce(self, plan: ops.PlanCollective) -> None:
        before = self.view.revision
        revision = self.pair.both("plan_collective", plan)
        if revision is not None:
            self.pair.seen["plan:new" if revision > before else "plan:repeated"] += 1

    def report_for_loads(self, draw: Draw) -> None:
        """Engines ask for a permit one after another, keep asking, give it back, or break."""
        for _ in range(draw.integer(1, 5)):
            self._report(draw, draw.pick(LOADERS), draw.pick(LOADING_STATES), wants_load=not draw.rarely(3))

    def take_turns(self, draw: Draw) -> None:
        """All engines want to load; whoever may is done soon, and then they ask in any order."""
        for _ in range(draw.integer(2, 4)):
            first = draw.integer(0, len(LOADERS) - 1)
            order = [*LOADERS[first:], *LOADERS[:first]]
            for engine_id in reversed(order) if draw.rarely(2) else order:
                self._report(draw, engine_id, "loading", wants_load=True)
                self.pair.do(Entry("time", (draw.pick((0, 1, 1, 2_500)),)))
            for engine_id in self.pair.inside.loading():
                self._report(draw, engine_id, "ready", wants_load=False)

    def _report(self, draw: Draw, engine_id: str, state: str, *, wants_load: bool) -> None:
        tokens, busy_ms, request_ms = draw.pick(COUNTERS)
        report = ops.EngineReport(
            engine_id,
            "w1",
            state,
            self.versions[-1],
            0,
            0,
            "",
            0,
            membership=draw.pick((0, 0, 1, (1 << 64) - 1)),
            prepared=draw.pick((None, None, self.versions[-1], self.versions[0])),
            weights_url=draw.pick(("", "", "http://w1:9000")),
            wants_load=wants_load,
            decoded_tokens=tokens,
            decode_busy_ms=busy_ms,
            decode_request_ms=request_ms,
            reload_counters=draw.pick(((), [tokens, busy_ms] * len(RELOAD_PHASES))),
        )
        reported = self.pair.both("report_engine", report)
        waits = reported is not None and wants_load and not reported.may_load
        self.pair.seen["load:not_its_turn"] += waits and self.pair.inside.has_free_permit()

    def outlive_a_place(self, draw: Draw) -> None:
        """A permit is kept to its last moment, or lapses, and others ask for it then."""
        self.report_for_loads(draw)
        permits = sorted({moment - self.pair.now for moment in self.pair.inside.permits()})
        ahead = [by_ms for by_ms in permits if by_ms >= 0]
        if ahead:
            self.pair.do(Entry("time", (draw.pick(ahead[:4]),)))
            self.report_for_loads(draw)

    def start_fresh(self, draw: Draw) -> None:
        """An engine shows how long it takes to load, and asks for work right after the next publish."""
        self.submit(draw)
        engine_id, lag = ENGINES[0], draw.pick((1, 40, 40, 2_000))
        self._report(draw, engine_id, "ready", wants_load=False)
        for after_ms in (lag, lag * draw.pick((7, 8, 40))):
            self.publish_some(1)
            self.pair.do(Entry("time", (after_ms,)))
            self._report(draw, engine_id, "ready", wants_load=False)
        old = self.versions[-1]
        self.publish_some(1)
        for after_ms in (0, draw.pick((lag, 2 * lag)), 1):
            self.pair.do(Entry("time", (after_ms,)))
            before = self.view.statistics["leases_granted"]
            self.lease_with(old, 1)
            granted = self.view.statistics["leases_granted"] > before
            self.pair.seen["lease:behind:" + ("granted" if granted else "none")] += 1
        self.lease_with_the_newest(1)

    def fall_silent(self, draw: Draw) -> None:
        """Engines and workers that were there are forgotten by the sweep, or just not yet; then some come back."""
        ahead = sorted({by_ms for moment in self.pair.inside.silences() if (by_ms := moment - self.pair.now) >= 0})
        if ahead:
            self.pair.do(Entry("time", (draw.pick(ahead),)))
        engines, workers = len(self.view.engines), self.pair.inside.workers()
        self.pair.do(Entry("sweep"))
        self.pair.seen["engine:forgotten"] += engines > len(self.view.engines)
        self.pair.seen["worker:forgotten"] += workers > self.pair.inside.workers()
        self._ask_again(draw)

    def hold_for_long(self, draw: Draw) -> None:
        """A worker that holds leases asks for nothing for an hour, gives them back, and is remembered after that."""
        self.submit(draw)
        self.lease(draw)
        self.pair.do(Entry("time", (FORGOTTEN_MS // 2,)))
        for lease_id, lease in self.pair.inside.leases().items():
            self.pair.both("extend", lease.worker_id, lease.instance_id, [lease_id])
        self.pair.do(Entry("time", (FORGOTTEN_MS // 2 + 1,)))
        self.pair.do(Entry("sweep"))
        leases = self.pair.inside.leases().items()
        self.pair.seen["worker:kept"] += bool(leases)
        for lease_id, lease in list(leases):
            back = ops.LeaseReturn(lease_id, ops.ReturnKind.INTERRUPTED, "", b"", None, 0)
            self.pair.both("give_back", lease.worker_id, lease.instance_id, [back])
        self.pair.do(Entry("sweep"))
        self._ask_again(draw)

    def _ask_again(self, draw: Draw) -> None:
        """An earlier request for leases is repeated, and there is something to lease."""
        if self.asks:
            self.submit(draw)
            again = draw.recent(self.asks)
            self.pair.both("lease", dataclasses.replace(again, loaded=self.view.published))
