"""A live run as the simulator plays it: what is asked, of what was measured, and the answer.

Inputs are on a grid of GRID, so that a run in a steady state asks the same thing again. How many slots there are, and
how many groups a worker leases ahead of them, nobody says: as many as let so many responses decode, and so many leases
be held, on average, as were measured. Where admission or a full queue holds engines back, that is more.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache

from buffer_service.domain.ops import RunView
from buffer_service.domain.policy import OverflowAction, RunPolicy
from buffer_service.domain.steering.decisions import Decision
from buffer_service.domain.steering.knobs import NOTHING_LOWERED, Knobs
from buffer_service.observability.estimate.closed_forms import Prediction
from buffer_service.observability.estimate.prediction import Setting, never_waits
from buffer_service.rules.totals import RELOAD_PHASES
from buffer_service.simulator import Simulation, SimulationResult, Workload, simulate
from buffer_service.simulator.buffer import DROPS
from buffer_service.simulator.lengths import Fixed, Lengths, Lognormal
from buffer_wire.errors import InvalidField, InvalidPolicy
from buffer_wire.estimate import Quantities

GRID = 0.01
NEAR = 0.03
"""Share by which a number may differ from that of an earlier question, whose answer still stands."""
STEPS, WARMUP = 200, 40
FITTING_STEPS = 60
EFFECT_STEPS = 100
LEAST_STEPS = 40
SAMPLES = 40_000
"""Responses of a simulation, which bound its steps: about 0.1 s of a core."""
MOST_GROUPS, MOST_RESPONSES = 64, 1_024
"""Larger batches are played smaller, with everything else in proportion."""
FEW_GROUPS, MANY = 16, 4
"""Groups of a batch up to which a run with so many times as many is played beside it."""
FITS, FITTED = 8, 0.98
"""Tries to find how many slots there are, and how near to what was measured is near enough."""
FULL = 0.9
"""Share of its room at which a queue counts as full."""
SPARE = 1.25
"""Slots over the requests that decode, where engines have more than they need; how many more decides nothing."""
LEAST_CALLS = 0.02
"""Share of a period from which it counts that the measured one is longer."""
MOST_IDLE = 0.95
MOST_SLOTS = 6
"""Most slots, over the requests that decode."""
AHEAD, OUTSTANDING = 2, 4
"""Groups in flight of the first try, over the leases that are held. Leases of a worker over its groups in flight."""
MOST_TAILNESS = 0.95
"""Share of the group size up to which a tailness is one of lengths without bound."""
_LEAST_SIGMA_TAILNESS = 1.01
_SEED = 1
_MOST_PAUSED = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A run to be simulated; times in those that a mean response takes to decode."""

    policy: RunPolicy
    group_size: int
    tailness: float
    concurrency: float
    """Responses that decode at once, while any does."""
    leased: float
    """Groups that workers hold leases of; 0: it is not known."""
    spare: bool
    """True where pushes wait for the trainer: engines could make more than they do."""
    step: float
    """Time of a training step."""
    idle: float
    """Share of its time that the trainer waits, calls included."""
    lag: float = 0.0
    """Time from a publish to the load."""
    pause: float = 0.0
    """Time of a load."""
    knobs: Knobs = NOTHING_LOWERED
    """A controller's, whose lookahead may be a fraction."""
    passing: float = 1.0
    """Share of the groups that pass the filter; concurrency and leases are those of them."""


def is_near(one: Question, other: Question) -> bool:
    """Tell whether the answer to one stands for the other: numbers differ by NEAR at most, all else is the same."""
    names = ("tailness", "concurrency", "leased", "step", "lag", "pause", "passing")
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    same = replace(other, idle=one.idle, **{name: getattr(one, name) for name in names}) == one
    return same and abs(one.idle - other.idle) <= NEAR and all(abs(a - b) <= NEAR * max(a, b) for a, b in pairs)


class Cause(StrEnum):
    """Parts of a run that can be left out of its simulation."""

    LOADS = "loads"
    """Loads that take time, and decoding that stands still meanwhile."""
    LEASES = "leases"
    """Leases that workers hold ahead of their slots."""
    WAITING_PUSHES = "waiting_pushes"
    """Pushes that wait for room, instead of the oldest groups' being dropped."""
    FEW_GROUPS = "few_groups"
    """Batches of so few groups that their number in a training time varies."""
    FILTER = "filter"


@dataclass(frozen=True, slots=True)
class Effect:
    """Difference that a cause makes: staleness in versions, and the period as a share of the one without it."""

    cause: Cause
    staleness: float
    period: float


@dataclass(frozen=True, slots=True)
class Played:
    """Simulation of a run, and what it would be without each cause that there is."""

    prediction: Prediction
    effects: tuple[Effect, ...] = ()


def question(view: RunView, known: Quantities, setting: Setting) -> Question | None:
    """The simulation of a run; None where something is not known, or the simulator has no answer."""
    concurrency, speed, length, size = known.concurrency, known.slot_tokens_per_s, known.mean_length, known.group_size
    if not (view.window and concurrency and speed and length and size and known.publish_period_s):
        return None
    lag_s, pause_s = load_s(view)
    paused = min(_MOST_PAUSED, pause_s / max(known.publish_period_s, lag_s + pause_s)) if pause_s else 0.0
    response_s = length / speed * (1 - paused)
    step_s = view.window.grown("trainer_busy_ms") / 1000 / view.window.publishes / setting.batches
    policy = _policy(view, setting)
    if policy is None:
        return None
    scale = max(1.0, policy.batch_groups / MOST_GROUPS, policy.batch_groups * size / MOST_RESPONSES)
    return Question(
        policy=_scaled(policy, 1 / scale),
        group_size=max(1, round(size)),
        tailness=_on_grid(setting.tailness),
        concurrency=_on_grid(concurrency * known.pass_share / scale),
        leased=_on_grid(view.window.grown("generation_ms") * known.pass_share / 1000 / view.window.seconds / scale),
        spare=_spare(view, known, setting),
        step=_on_grid(step_s / response_s),
        idle=round(known.trainer_idle_share or 0.0, 2),
        lag=_on_grid(lag_s / response_s),
        pause=_on_grid(pause_s / response_s),
        knobs=Knobs(lookahead_milli=view.decision.knobs.lookahead_milli),
        passing=_on_grid(known.pass_share),
    )


def answer(asked: Question) -> Played | None:
    """Simulate; None where nothing can go on. Takes some tenths of a second."""
    try:
        asked, slots, groups = _fitted(asked)
        found = simulate(_simulation(asked, slots, groups, STEPS))
        effects = tuple(_effects(asked, slots, groups))
    except (InvalidField, InvalidPolicy):
        return None
    return Played(Prediction(found.pqs, found.iqs, found.train_period_ratio), effects)


def _effects(asked: Question, slots: int, groups: int) -> Iterator[Effect]:
    others = dict(_without(asked, slots, groups))
    if not others:
        return
    staleness, period = _played(_simulation(asked, slots, groups, EFFECT_STEPS))
    for cause, other in others.items():
        without, period_without = _played(other)
        yield Effect(cause, staleness - without, period / period_without - 1)


def _played(simulation: Simulation) -> tuple[float, float]:
    """Mean staleness, and the period in token times."""
    found = simulate(simulation)
    ideal = simulation.workload.ideal_period(simulation.policy.batch_groups, simulation.seed)
    return found.staleness, found.train_period_ratio * ideal


def _without(asked: Question, slots: int, groups: int) -> Iterator[tuple[Cause, Simulation]]:
    """The run without each cause that there is."""
    if asked.lag or asked.pause:
        yield Cause.LOADS, _simulation(replace(asked, lag=0.0, pause=0.0), slots, groups, EFFECT_STEPS)
    rejects = asked.policy.overflow_action is OverflowAction.REJECT
    # Without a bound on leases what is rejected has none.
    if asked.leased and groups * asked.group_size > slots and not rejects:
        yield Cause.LEASES, _simulation(replace(asked, leased=0.0), slots, 0, EFFECT_STEPS)
    if DROPS[asked.policy.overflow_action] is None:
        dropping = replace(asked.policy, overflow_action=OverflowAction.DROP_OLDEST)
        yield Cause.WAITING_PUSHES, _simulation(replace(asked, policy=dropping), slots, groups, EFFECT_STEPS)
    if asked.policy.batch_groups <= FEW_GROUPS:
        many = replace(asked, policy=_scaled(asked.policy, MANY))
        yield Cause.FEW_GROUPS, _simulation(many, slots * MANY, groups * MANY, EFFECT_STEPS)
    if asked.passing < 1:
        unfiltered = replace(asked, concurrency=asked.concurrency / asked.passing)
        more = round(slots / asked.passing), round(groups / asked.passing)
        yield Cause.FILTER, _simulation(unfiltered, *more, EFFECT_STEPS)


def _fitted(asked: Question) -> tuple[Question, int, int]:
    """Slots, and groups in flight: so many responses decode, and leases are held, as were measured.

    By a few short simulations. A worker leases ahead of its slots, and holds more leases than it generates. What a
    trainer waits beyond that is for its calls, and lengthens its step.
    """
    slots = max(1, math.ceil(SPARE * asked.concurrency) if asked.spare else round(asked.concurrency))
    most = math.ceil(MOST_SLOTS * asked.concurrency)
    groups = max(1, round(AHEAD * asked.leased))
    period = asked.step / (1 - min(MOST_IDLE, asked.idle))
    for _ in range(FITS):
        found = simulate(_simulation(asked, slots, groups, FITTING_STEPS))
        decoding, held = found.mean_concurrency, found.mean_leased / asked.leased if asked.leased else 1.0
        if slots < most and decoding < FITTED * min(asked.concurrency, slots):
            slots = min(math.ceil(slots * asked.concurrency / decoding), most)
        elif slots < most and decoding < FITTED * slots and held > 1 / FITTED and not asked.spare:
            # Admission holds back, and groups are in flight for too long: more slots make them shorter.
            slots = min(math.ceil(slots * held), most)
        elif not FITTED <= held <= 1 / FITTED and round(groups / held) not in {0, groups}:
            groups = round(groups / held)
        elif (calls := period - _period(asked, slots, found)) > LEAST_CALLS * period:
            asked = replace(asked, step=asked.step + calls)
        else:
            break
    return asked, slots, groups


def _simulation(asked: Question, slots: int, groups: int, steps: int) -> Simulation:
    lengths = _lengths(asked.tailness, asked.group_size)
    batch = asked.policy.batch_groups * asked.group_size
    steps = max(LEAST_STEPS, min(steps, SAMPLES // batch))
    workload = Workload(
        concurrency=slots,
        group_size=asked.group_size,
        # A step of the simulator takes ρ times what its slots need for a batch.
        rho=asked.step * slots / batch,
        lengths=lengths,
        reload_pause=asked.pause * lengths.mean,
        publish_lag=asked.lag * lengths.mean,
        # Fewer than slots need would hold back what was measured.
        groups_in_flight=max(groups, slots // asked.group_size + 1) if asked.leased else 0,
        groups_outstanding=OUTSTANDING * groups if asked.leased else 0,
    )
    steered = asked.policy.target_staleness_milli > 0
    return Simulation(
        policy=asked.policy,
        workload=workload,
        steps=steps,
        warmup=WARMUP * steps // STEPS + 4,
        seed=_SEED,
        controller=(lambda situation: Decision(version=situation.version, knobs=asked.knobs)) if steered else None,
    )


def _period(asked: Question, slots: int, found: SimulationResult) -> float:
    """Period of a simulation, in times that a mean response takes."""
    rollout = asked.policy.batch_groups * asked.group_size / slots
    return found.train_period_ratio * max(rollout, asked.step)


def _spare(view: RunView, known: Quantities, setting: Setting) -> bool:
    waits = DROPS[view.policy.overflow_action] is None and never_waits(known)
    return waits and view.groups["queued"].groups >= FULL * setting.queue


@cache
def _lengths(tailness: float, group_size: int) -> Lengths:
    tailness = min(tailness, MOST_TAILNESS * group_size)
    if tailness < _LEAST_SIGMA_TAILNESS:
        return Fixed(1_000)
    return Lognormal.with_tailness(tailness, group_size)


def _policy(view: RunView, setting: Setting) -> RunPolicy | None:
    """The policy as the simulator takes it: N as it is, caps in groups, one environment."""
    policy, groups = view.policy, max(1, round(setting.per_batch))
    try:
        return replace(
            policy,
            preset="",
            batch_groups=groups,
            batch_tokens=0,
            batches_per_publish=setting.batches,
            max_queued_groups=max(round(setting.queue), 1 if setting.streams else groups),
            max_queued_tokens=0,
            micro_batch_groups=round(setting.take) if setting.streams else 0,
            quota_groups=0,
            quota_tokens=0,
            quota_bytes=0,
            environments=(),
            cancel_stale_leases=False,
        )
    except (InvalidField, InvalidPolicy):
        return None


def _scaled(policy: RunPolicy, scale: float) -> RunPolicy:
    """The policy with every number of groups multiplied."""
    names = ("batch_groups", "max_queued_groups", "micro_batch_groups", "max_inflight_groups", "order_window_groups")
    sizes = {name: getattr(policy, name) for name in names}
    return replace(policy, **{name: max(1, round(size * scale)) for name, size in sizes.items() if size})


def load_s(view: RunView) -> tuple[float, float]:
    """Mean times from a publish to the pause of a load, and of that pause."""
    ms = {phase: view.reload_counters[2 * index + 1] for index, phase in enumerate(RELOAD_PHASES)}
    loads = view.reload_counters[2 * RELOAD_PHASES.index("load")]
    if not loads:
        return 0.0, 0.0
    before, during = ("fetch", "wait", "join"), ("pause", "load", "resume")
    return sum(ms[one] for one in before) / loads / 1000, sum(ms[one] for one in during) / loads / 1000


def _on_grid(value: float) -> float:
    """The value, off by half of GRID of it at most."""
    if value <= 0:
        return 0.0
    return round(math.exp(round(math.log(value) / GRID) * GRID), 6)
