"""A live run as the simulator plays it: the answer to a question.

Only a child imports this (`__main__.py`): the service itself does without the simulator and numpy. How many slots there
are, and how many groups a worker leases ahead of them, nobody says: as many as let so many responses decode, and so
many leases be held, on average, as were measured. Where admission or a full queue holds engines back, that is more.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from buffer_service.domain.policy import OverflowAction
from buffer_service.domain.steering.decisions import Decision
from buffer_service.observability.estimate.closed_forms import Prediction
from buffer_service.observability.estimate.questions import Cause, Effect, Played, Question, scaled
from buffer_service.simulator import Simulation, SimulationResult, Workload, simulate
from buffer_service.simulator.buffer import DROPS
from buffer_service.simulator.lengths import Fixed, Lengths, Lognormal
from buffer_wire.errors import InvalidField, InvalidPolicy

STEPS, WARMUP = 200, 40
FITTING_STEPS = 60
EFFECT_STEPS = 100
LEAST_STEPS = 40
SAMPLES = 40_000
"""Responses of a simulation, which bound its steps: about 0.1 s of a core."""
FEW_GROUPS, MANY = 16, 4
"""Groups of a batch up to which a run with so many times as many is played beside it."""
FITS, FITTED = 8, 0.98
"""Tries to find how many slots there are, and how near to what was measured is near enough."""
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
        many = replace(asked, policy=scaled(asked.policy, MANY))
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


@cache
def _lengths(tailness: float, group_size: int) -> Lengths:
    tailness = min(tailness, MOST_TAILNESS * group_size)
    if tailness < _LEAST_SIGMA_TAILNESS:
        return Fixed(1_000)
    return Lognormal.with_tailness(tailness, group_size)
