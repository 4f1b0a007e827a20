"""A live run as the simulator plays it: what is asked, of what was measured, and the answer.

Inputs are on a grid of GRID, so that a run in a steady state asks the same thing again. How many slots there are, and
how many groups a worker leases ahead of them, nobody says: as many as let so many responses decode, and so many leases
be held, on average, as were measured. Where admission or a full queue holds engines back, that is more.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

from buffer_service.domain.ops import RunView
from buffer_service.domain.policy import OverflowAction, RunPolicy
from buffer_service.domain.steering.decisions import Decision
from buffer_service.domain.steering.knobs import NOTHING_LOWERED, Knobs
from buffer_service.observability.estimate.closed_forms import Prediction
from buffer_service.observability.estimate.prediction import Setting, never_waits
from buffer_service.rules.totals import RELOAD_PHASES
from buffer_service.simulator import Simulation, Workload, simulate
from buffer_service.simulator.lengths import Fixed, Lengths, Lognormal
from buffer_wire.errors import InvalidField, InvalidPolicy
from buffer_wire.estimate import Quantities

GRID = 0.01
STEPS, WARMUP = 200, 40
FITTING_STEPS = 60
LEAST_STEPS = 40
SAMPLES = 60_000
"""Responses of a simulation, which bound its steps: about 0.1 s of a core."""
MOST_GROUPS = 64
"""Larger batches are played smaller, with everything else in proportion."""
FITS, FITTED = 6, 0.98
"""Tries to find how many slots there are, and how near to what was measured is near enough."""
SPARE = 1.5
"""Slots over the requests that decode, where engines have more than they need; how many more decides nothing."""
AHEAD, OUTSTANDING = 2, 2
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
    """True where the trainer never waits, and pushes do: engines could make more than they do."""
    step: float
    """Time of a training step."""
    lag: float = 0.0
    """Time from a publish to the load."""
    pause: float = 0.0
    """Time of a load."""
    knobs: Knobs = NOTHING_LOWERED
    """A controller's, whose lookahead may be a fraction."""


def question(view: RunView, known: Quantities, setting: Setting) -> Question | None:
    """The simulation of a run; None where something is not known, or the simulator has no answer."""
    concurrency, speed, length, size = known.concurrency, known.slot_tokens_per_s, known.mean_length, known.group_size
    if not (view.window and concurrency and speed and length and size and known.publish_period_s):
        return None
    lag_s, pause_s = _load_s(view)
    paused = min(_MOST_PAUSED, pause_s / max(known.publish_period_s, lag_s + pause_s)) if pause_s else 0.0
    response_s = length / speed * (1 - paused)
    step_s = view.window.grown("trainer_busy_ms") / 1000 / view.window.publishes / setting.batches
    policy = _policy(view, setting)
    if policy is None:
        return None
    scale = max(1.0, policy.batch_groups / MOST_GROUPS)
    return Question(
        policy=_smaller(policy, scale),
        group_size=max(1, round(size)),
        tailness=_on_grid(setting.tailness),
        concurrency=_on_grid(concurrency * known.pass_share / scale),
        leased=_on_grid(view.window.grown("generation_ms") / 1000 / view.window.seconds / scale),
        spare=policy.overflow_action is not OverflowAction.DROP_OLDEST and never_waits(known),
        step=_on_grid(step_s / response_s),
        lag=_on_grid(lag_s / response_s),
        pause=_on_grid(pause_s / response_s),
        knobs=Knobs(lookahead_milli=view.decision.knobs.lookahead_milli),
    )


def answer(asked: Question) -> Prediction | None:
    """Simulate; None where nothing can go on. Takes up to some tenths of a second."""
    try:
        found = simulate(_simulation(asked, *_workers(asked), STEPS))
    except (InvalidField, InvalidPolicy):
        return None
    return Prediction(found.pqs, found.iqs, found.train_period_ratio)


def _workers(asked: Question) -> tuple[int, int]:
    """Slots, and groups in flight: so many responses decode, and leases are held, as were measured.

    By a few short simulations. A worker leases ahead of its slots, and holds twice as many leases as it generates.
    """
    slots = max(1, math.ceil(SPARE * asked.concurrency) if asked.spare else round(asked.concurrency))
    groups = max(1, round(AHEAD * asked.leased))
    for _ in range(FITS):
        found = simulate(_simulation(asked, slots, groups, FITTING_STEPS))
        decoding, leased = found.mean_concurrency, found.mean_leased
        tried = slots, groups
        if decoding < FITTED * min(asked.concurrency, slots):
            slots = math.ceil(slots * asked.concurrency / decoding)
        if leased and asked.leased and abs(leased / asked.leased - 1) > 1 - FITTED:
            groups = max(1, round(groups * asked.leased / leased))
        if (slots, groups) == tried:
            break
    return slots, groups


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
        groups_in_flight=groups if asked.leased else 0,
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


def _smaller(policy: RunPolicy, scale: float) -> RunPolicy:
    """The policy with every number of groups divided."""
    if scale <= 1:
        return policy
    names = ("batch_groups", "max_queued_groups", "micro_batch_groups", "max_inflight_groups")
    sizes = {name: getattr(policy, name) for name in names}
    return replace(policy, **{name: max(1, round(size / scale)) for name, size in sizes.items() if size})


def _load_s(view: RunView) -> tuple[float, float]:
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
