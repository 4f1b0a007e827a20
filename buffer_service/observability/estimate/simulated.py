"""A live run as the simulator plays it: what is asked, of what was measured, and the answer.

Inputs are on a grid of GRID, so that a run in a steady state asks the same thing again. How many slots there are no
engine says: as many as let so many responses decode at once, on average, as were measured. Where admission or a full
queue holds engines back, that is more than decode.
"""

import math
from dataclasses import dataclass, replace

from buffer_service.domain.ops import RunView
from buffer_service.domain.policy import UNSET, OverflowAction, RunPolicy
from buffer_service.observability.estimate.closed_forms import Prediction
from buffer_service.observability.estimate.prediction import Setting
from buffer_service.rules.totals import RELOAD_PHASES
from buffer_service.simulator import Simulation, SimulationResult, Workload, simulate
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
FITS, FITTED = 5, 0.98
"""Tries to find how many slots there are, and the share of the measured concurrency that is enough."""
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
    step: float
    """Time of a training step."""
    lag: float = 0.0
    """Time from a publish to the load."""
    pause: float = 0.0
    """Time of a load."""


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
        step=_on_grid(step_s / response_s),
        lag=_on_grid(lag_s / response_s),
        pause=_on_grid(pause_s / response_s),
    )


def answer(asked: Question) -> Prediction | None:
    """Simulate; None where nothing can go on. Takes up to some tenths of a second."""
    try:
        slots = _slots(asked)
        found = simulate(_simulation(asked, slots, STEPS))
    except (InvalidField, InvalidPolicy):
        return None
    return Prediction(found.pqs, found.iqs, found.train_period_ratio)


def _slots(asked: Question) -> int:
    """Slots of which as many decode as were measured, by a few short simulations."""
    slots = max(1, round(asked.concurrency))
    for _ in range(FITS):
        decoding = _played(asked, slots).mean_concurrency
        if decoding >= FITTED * min(asked.concurrency, slots):
            break
        slots = math.ceil(slots * asked.concurrency / decoding)
    return slots


def _played(asked: Question, slots: int) -> SimulationResult:
    return simulate(_simulation(asked, slots, FITTING_STEPS))


def _simulation(asked: Question, slots: int, steps: int) -> Simulation:
    lengths = _lengths(asked)
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
    )
    return Simulation(
        policy=asked.policy, workload=workload, steps=steps, warmup=WARMUP * steps // STEPS + 4, seed=_SEED
    )


def _lengths(asked: Question) -> Lengths:
    tailness = min(asked.tailness, MOST_TAILNESS * asked.group_size)
    if tailness < _LEAST_SIGMA_TAILNESS:
        return Fixed(1_000)
    return Lognormal.with_tailness(tailness, asked.group_size)


def _policy(view: RunView, setting: Setting) -> RunPolicy | None:
    """The policy as the simulator takes it: N as it is, caps in groups, one environment."""
    policy, groups = view.policy, max(1, round(setting.per_batch))
    held = policy.max_inflight_groups
    if policy.overflow_action is OverflowAction.REJECT and not held and policy.max_lookahead == UNSET:
        # Nothing else bounds what is tried again than what the workers hold.
        held = max(view.tasks["leased"], groups)
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
            max_inflight_groups=held,
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
