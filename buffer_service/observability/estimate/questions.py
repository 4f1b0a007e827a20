"""Question about a live run that a simulation answers, and the answer: data alone, for whoever does not simulate.

Inputs are on a grid of GRID, so that a run in a steady state asks the same thing again.
"""

import json
import math
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Self

from buffer_service.domain.ops import RunView
from buffer_service.domain.policy import RunPolicy
from buffer_service.domain.steering.knobs import NOTHING_LOWERED, Knobs
from buffer_service.observability.estimate.closed_forms import Prediction
from buffer_service.observability.estimate.prediction import Setting, never_waits
from buffer_service.rules.totals import RELOAD_PHASES
from buffer_wire.errors import InvalidField, InvalidPolicy
from buffer_wire.estimate import Quantities

GRID = 0.01
NEAR = 0.03
"""Share by which a number may differ from that of an earlier question, whose answer still stands."""
MOST_GROUPS, MOST_RESPONSES = 64, 1_024
"""Larger batches are played smaller, with everything else in proportion."""
FULL = 0.9
"""Share of its room at which a queue counts as full."""
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

    def to_json(self) -> str:
        """Write the question on a line, for a child."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({**values, "policy": self.policy.to_store(), "knobs": asdict(self.knobs)})

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Read what `to_json` wrote."""
        values = json.loads(line)
        return cls(**{**values, "policy": RunPolicy.from_store(values["policy"]), "knobs": Knobs(**values["knobs"])})


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

    def to_json(self) -> str:
        """Write the answer on a line, for the parent."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Read what `to_json` wrote."""
        values = json.loads(line)
        effects = (Effect(**{**effect, "cause": Cause(effect["cause"])}) for effect in values["effects"])
        return cls(Prediction(**values["prediction"]), tuple(effects))


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
    largest = min(policy.batch_groups, MOST_GROUPS, MOST_RESPONSES / size)
    # To a whole batch: rounded each for itself, a queue could fall below what waits for room need.
    scale = policy.batch_groups / max(1, round(largest))
    return Question(
        policy=scaled(policy, 1 / scale),
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


def _spare(view: RunView, known: Quantities, setting: Setting) -> bool:
    return not setting.drops and never_waits(known) and view.groups["queued"].groups >= FULL * setting.queue


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
            stages=(),
        )
    except (InvalidField, InvalidPolicy):
        return None


def scaled(policy: RunPolicy, scale: float) -> RunPolicy:
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
