"""The simulation itself: whatever comes next, the end of a group or of a training, then what follows from it."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from buffer_service.domain.policy import RunPolicy
from buffer_service.simulator.buffer import Buffer, refuse_what_is_not_simulated
from buffer_service.simulator.compact_buffer import CompactBuffer
from buffer_service.simulator.groups import SimulatedGroup
from buffer_service.simulator.measures import Measures, Moment
from buffer_service.simulator.result import SimulationResult
from buffer_service.simulator.slots import Slots
from buffer_service.simulator.steering import Controller, Steering
from buffer_service.simulator.trainer import Trainer
from buffer_service.simulator.workload import Jump, Workload
from buffer_wire.errors import InvalidField, InvalidPolicy

FRESH_START_SHARE = 8
"""Times that the period between two publishes is longer than a load for which engines are let load first."""

Trace = Callable[[str, int, int], None]
"""Told of every decision: its kind (leased, refused, queued, blocked, taken), the group's number, and for leased its
generation, for taken the step.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A simulation to be run. Picklable."""

    policy: RunPolicy
    workload: Workload
    steps: int = 400
    """Train steps that are measured."""
    warmup: int = 100
    """Train steps before them that are not."""
    seed: int = 0
    controller: Controller | None = None
    """Asked after each publish, where the policy has a target of staleness."""
    jump: Jump | None = None


def simulate(
    simulation: Simulation, trace: Trace | None = None, buffer: Callable[[RunPolicy], Buffer] = CompactBuffer
) -> SimulationResult:
    """Run a simulation. Raises InvalidField for what is not simulated, InvalidPolicy when nothing can go on."""
    if simulation.steps < 1 or simulation.warmup < 0:
        raise InvalidField("steps", simulation.steps, "at least 1, and a warm-up of 0 or more")
    refuse_what_is_not_simulated(simulation.policy, simulation.workload.groups_outstanding)
    if simulation.policy.target_staleness_milli and simulation.controller is None:
        limit = "0, to be simulated without a controller"
        raise InvalidField("policy.target_staleness_milli", simulation.policy.target_staleness_milli, limit)
    return _Run(simulation, trace, buffer(simulation.policy)).result()


class _Run:
    def __init__(self, simulation: Simulation, trace: Trace | None, buffer: Buffer) -> None:
        policy, workload = simulation.policy, simulation.workload
        self._simulation = simulation
        self._trace = trace
        self._buffer = buffer
        self._blocked = 0
        """Pushes that wait for room."""
        self._held = 0
        """Groups that are leased and not accepted."""
        self._held_since = self._held_time = 0.0
        """Time of the last change of that, and the sum over groups of the time for which they were."""
        rollout_time = workload.rollout_time(policy.batch_groups, simulation.seed)
        self._ideal_period = workload.ideal_period(policy.batch_groups, simulation.seed)
        self._measures = Measures()
        self._slots = Slots(workload, simulation.seed, self._lease, longest_first=policy.longest_first)
        self._published = 0
        self._published_at = -inf
        self._loads_first = False
        """Engines begin nothing new before they have loaded what is published; see docs/policies.md, fresh starts."""
        self._loaded_at = inf
        """Wall time at which engines pause for what `_loading` says; inf: they have the newest weights."""
        self._loading = 0
        self._trainer = Trainer(policy, rollout_time * workload.rho, self._buffer, self._take)
        self._jump = simulation.jump
        controller = simulation.controller if policy.target_staleness_milli else None
        self._steering = Steering(policy, controller, self._buffer) if controller is not None else None

    def result(self) -> SimulationResult:
        """Run, and measure."""
        slots, trainer, measures = self._slots, self._trainer, self._measures
        warmup, last = self._simulation.warmup, self._simulation.warmup + self._simulation.steps
        slots.fill()
        while trainer.trained_steps < last:
            if measures.begun is None and trainer.trained_steps >= warmup:
                measures.begun = self._moment()
            group = slots.advance(min(trainer.done_at, self._loaded_at))
            if group is not None:
                self._push(group)
            elif self._loaded_at <= trainer.done_at and self._loaded_at < inf:
                self._load()
            elif trainer.done_at == inf:
                raise InvalidPolicy("max_lookahead", "nothing is in flight and too little is queued for a batch")
            else:
                self._finish_training()
            slots.fill()
        return self._measured()

    def _lease(self, group: SimulatedGroup) -> bool:
        waits_for_load = self._loads_first and self._loaded_at < inf
        leased = not self._holds_enough() and not waits_for_load and self._buffer.lease(group)
        if leased:
            self._hold(1, self._slots.wall())
        self._tell("leased" if leased else "refused", group, group.incarnation)
        if leased and self._steering is not None:
            self._steering.leased(group, self._slots.wall())
        return leased

    def _holds_enough(self) -> bool:
        """Tell whether workers ask for no more leases, for what they hold."""
        most = self._simulation.workload.groups_outstanding
        return self._held >= most if most else self._blocked > 0

    def _hold(self, more: int, wall: float) -> None:
        self._held_time += self._held * max(0.0, wall - self._held_since)
        self._held_since = max(wall, self._held_since)
        self._held += more

    def _push(self, group: SimulatedGroup) -> None:
        self._measures.sampled(group)
        queued = self._buffer.push(group)
        self._blocked += not queued
        self._tell("queued" if queued else "blocked", group, 0)
        if self._steering is not None:
            self._steering.pushed(group, self._slots.wall())
        if queued:
            self._hold(-1, self._slots.wall())
            self._pull(self._slots.wall())

    def _finish_training(self) -> None:
        wall = self._trainer.done_at
        published = self._trainer.finish()
        if self._jump is not None and self._trainer.trained_steps >= self._jump.step:
            self._slots.jump(self._jump)
            self._trainer.jump(self._jump.length)
            self._jump = None
        if published:
            self._published = self._trainer.version
            self._loads_first = self._is_load_short(wall - self._published_at)
            self._published_at = wall
            if self._steering is not None:
                self._steering.published(self._published, wall, self._trainer.idle_time)
            self._begin_load(wall)
        self._pull(wall)

    def _is_load_short(self, period: float) -> bool:
        """Tell whether engines are let load first after a publish; the store's rule, the first load aside.

        The bound in ms has no counterpart here, where the unit of time is that of a token.
        """
        workload = self._simulation.workload
        lag = workload.publish_lag + workload.reload_pause
        return self._simulation.policy.fresh_start_ms > 0 and lag * FRESH_START_SHARE <= period

    def _begin_load(self, wall: float) -> None:
        """Have engines load what is published, if they do not load something already."""
        if self._loaded_at < inf:
            return
        self._loading, self._loaded_at = self._published, wall + self._simulation.workload.publish_lag
        if not self._simulation.workload.publish_lag:
            self._load()

    def _load(self) -> None:
        wall, self._loaded_at = self._loaded_at, inf
        self._slots.load(self._loading, wall)
        if self._loading < self._published:
            self._begin_load(wall)

    def _pull(self, wall: float) -> None:
        """Pull, and let pushes that wait in line into the room that it made (also by eviction), as long as either goes
        on.
        """
        while True:
            pulled, blocked = self._trainer.pull(wall), self._blocked
            if blocked:
                self._blocked = self._buffer.retry()
                self._hold(self._blocked - blocked, wall)
            if self._blocked == blocked and not (pulled and blocked):
                return

    def _take(self, group: SimulatedGroup, step: int, train_version: int) -> None:
        self._tell("taken", group, step)
        if self._steering is not None:
            self._steering.taken(group, train_version)
        if step >= self._simulation.warmup:
            self._measures.trained(group, train_version)

    def _tell(self, kind: str, group: SimulatedGroup, step: int) -> None:
        if self._trace is not None:
            self._trace(kind, group.number, step)

    def _moment(self) -> Moment:
        slots = self._slots
        wall = slots.wall()
        self._hold(0, wall)
        return Moment(
            wall=wall,
            trainer_idle=self._trainer.idle_time,
            slot_time=slots.now,
            slots_idle=slots.idle_time,
            slots_busy=slots.busy_time,
            held=self._held_time,
            losses=self._buffer.losses(),
            cut_tokens=slots.cut_tokens,
        )

    def _measured(self) -> SimulationResult:
        simulation, now = self._simulation, self._moment()
        m, workload = self._measures, simulation.workload
        begun = m.begun or now
        lost, lost_before = now.losses, begun.losses
        responses, trained = m.sampled_groups * workload.group_size, m.trained_groups * workload.group_size
        if not m.sampled_groups or not m.trained_groups:
            raise InvalidField("steps", simulation.steps, "more: no group was generated in them")
        sampled_mean, cut = m.sampled_tokens / responses, now.cut_tokens - begun.cut_tokens
        return SimulationResult(
            pqs=m.pqs / m.trained_groups,
            iqs=m.iqs / m.trained_groups,
            staleness=(m.pqs + m.iqs) / m.trained_groups,
            token_staleness=m.token_staleness / m.trained_tokens,
            staleness_p95=m.quantile(0.95),
            staleness_max=max(m.staleness),
            tailness=m.sampled_longest / m.sampled_groups / sampled_mean,
            train_period_ratio=(now.wall - begun.wall) / simulation.steps / self._ideal_period,
            sampled_mean_length=sampled_mean,
            trained_mean_length=m.trained_tokens / trained,
            sampled_max_length=m.sampled_max,
            trained_max_length=m.trained_max,
            dropped_groups=lost.dropped - lost_before.dropped,
            recycled_groups=lost.recycled - lost_before.recycled,
            wasted_token_share=(lost.tokens - lost_before.tokens + cut) / (m.made_tokens + cut),
            surplus_token_share=cut / (m.made_tokens + cut),
            trainer_idle_share=(now.trainer_idle - begun.trainer_idle) / (now.wall - begun.wall),
            slot_idle_share=(now.slots_idle - begun.slots_idle)
            / (workload.concurrency * (now.slot_time - begun.slot_time)),
            mean_concurrency=(
                workload.concurrency * (now.slot_time - begun.slot_time) - (now.slots_idle - begun.slots_idle)
            )
            / (now.slots_busy - begun.slots_busy),
            mean_leased=(now.held - begun.held) / (now.wall - begun.wall),
            steps=simulation.steps,
            warmup=simulation.warmup,
            seed=simulation.seed,
            staleness_counts=tuple(m.staleness[versions] for versions in range(max(m.staleness) + 1)),
        )
