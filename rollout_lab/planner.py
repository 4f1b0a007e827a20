"""Plans: what a setting will cost in staleness, what each lever would change, and how to split a budget of GPUs.

Predictions are the closed forms; whoever asks near balance has them simulated as well (`simulation_of`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from buffer_service.observability.estimate import closed_forms
from buffer_service.observability.estimate.closed_forms import Prediction
from buffer_service.simulator import Simulation, Workload
from buffer_service.simulator.lengths import Lengths, Lognormal, token_tailness
from buffer_wire.errors import InvalidField
from rollout_lab.queue_policies import QUEUE_DROP, STREAMING, queue_policy

AREAL = "areal"
POLICIES = (QUEUE_DROP, STREAMING, AREAL)
"""Those with a closed form."""

DEFAULT_LOOKAHEAD = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Setting of a loop: the numbers that staleness depends on."""

    concurrency: float
    """Slots; whole but where splits are compared as if GPUs were divisible."""
    groups_per_batch: int
    group_size: int
    rho: float
    tailness: float
    queue_factor: float | None = None
    """Unset: 1, for streaming two micro-batches."""
    policy: str = QUEUE_DROP
    micro_batch: int | None = None
    """Groups; unset: an eighth of a batch."""
    max_staleness: int | None = None
    """AReaL's η; unset: 1."""

    def __post_init__(self) -> None:
        for name in ("concurrency", "groups_per_batch", "group_size"):
            if getattr(self, name) < 1:
                raise InvalidField(name, getattr(self, name), "at least 1")
        if not 1 <= self.tailness <= self.group_size:
            raise InvalidField("tailness", self.tailness, f"1 to the group size, {self.group_size}")

    @property
    def closed_form_is_rough(self) -> bool:
        """True where the simulator should be asked: near balance, and for the period under admission."""
        return closed_forms.is_rough(self.rho) or self.policy == AREAL

    @property
    def batch_rollouts(self) -> int:
        """B."""
        return self.groups_per_batch * self.group_size

    @property
    def concurrency_ratio(self) -> float:
        """C/B."""
        return self.concurrency / self.batch_rollouts

    @property
    def micro_groups(self) -> int:
        """Groups of a micro-batch."""
        return self.micro_batch or max(1, self.groups_per_batch // 8)


def predict(setting: Setting) -> Prediction:
    """The closed form of a setting. Raises InvalidField, also for a policy that has none."""
    ratio, rho, tailness = setting.concurrency_ratio, setting.rho, setting.tailness
    if setting.policy == QUEUE_DROP:
        return closed_forms.queue_drop(
            ratio, 1.0 if setting.queue_factor is None else setting.queue_factor, rho, tailness
        )
    if setting.policy == STREAMING:
        share = setting.micro_groups / setting.groups_per_batch
        queue = 2.0 if setting.queue_factor is None else setting.queue_factor / share
        return closed_forms.streaming(ratio, share, queue, rho, tailness)
    if setting.policy == AREAL:
        lookahead = DEFAULT_LOOKAHEAD if setting.max_staleness is None else setting.max_staleness
        at_once = min(setting.batch_rollouts, setting.concurrency)
        slowest = (
            Lognormal.with_tailness(tailness, setting.group_size).tailness(round(at_once)) if lookahead == 0 else 1.0
        )
        return closed_forms.admission_limited(ratio, lookahead, rho, tailness, slowest)
    raise InvalidField("policy", setting.policy, f"one of {', '.join(POLICIES)}; others can only be simulated")


def token_staleness(setting: Setting, lengths: Lengths | None) -> float:
    """The closed form of the mean over tokens; lognormal lengths with the setting's tailness where none are given."""
    known = lengths or Lognormal.with_tailness(setting.tailness, setting.group_size)
    of_tokens = token_tailness(known, setting.group_size)
    prediction = predict(setting)
    return closed_forms.token_staleness(prediction, setting.concurrency_ratio, setting.rho, of_tokens, known.variation)


def simulation_of(setting: Setting, lengths: Lengths | None, *, steps: int, warmup: int, seed: int) -> Simulation:
    """The simulation of a setting; lognormal lengths with its tailness where none are given."""
    name, eta = setting.policy, setting.max_staleness
    fields: dict[str, object] = {}
    if name == AREAL:
        name, eta = f"{AREAL}({DEFAULT_LOOKAHEAD if eta is None else eta})", None
        # The closed form and `concurrency` are of slots that are all used: max_concurrent_rollouts is above C.
        fields["max_inflight_groups"] = 0
    policy = queue_policy(
        name,
        setting.groups_per_batch,
        queue_factor=setting.queue_factor if setting.policy != AREAL else None,
        max_staleness=eta if setting.policy != QUEUE_DROP else None,
        micro_batch=setting.micro_batch,
        **fields,
    )
    drawn = lengths or Lognormal.with_tailness(setting.tailness, setting.group_size)
    workload = Workload(round(setting.concurrency), setting.group_size, setting.rho, drawn)
    return Simulation(policy=policy, workload=workload, steps=steps, warmup=warmup, seed=seed)


def levers(setting: Setting) -> list[tuple[str, Prediction]]:
    """Prediction with each lever alone, by name; levers that change nothing are left out."""
    n = setting.groups_per_batch
    changes = [
        ("rollout-bound, ρ 0.8", replace(setting, rho=0.8)),
        ("queue factor 1", replace(setting, policy=QUEUE_DROP, queue_factor=1.0)),
        ("twice the batch", replace(setting, groups_per_batch=2 * n)),
        ("half the concurrency", replace(setting, concurrency=max(1, setting.concurrency // 2))),
        ("shorter tail, M - 1 halved", replace(setting, tailness=1 + (setting.tailness - 1) / 2)),
        ("streaming", replace(setting, policy=STREAMING, queue_factor=None)),
        ("admission, η 1 (period: at least)", replace(setting, policy=AREAL, max_staleness=1)),
    ]
    present = predict(setting)
    predictions = [(name, predict(changed)) for name, changed in changes]
    return [(name, prediction) for name, prediction in predictions if prediction != present]


# ── a fixed budget of GPUs ───────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """GPUs and what each makes of either work."""

    gpus: int
    rollout_tps_per_gpu: float
    train_tps_per_gpu: float
    mean_length: float
    """L̄, tokens."""

    def __post_init__(self) -> None:
        if self.gpus < 2:
            raise InvalidField("gpus", self.gpus, "at least 2: one to generate, one to train")
        for name in ("rollout_tps_per_gpu", "train_tps_per_gpu", "mean_length"):
            if not getattr(self, name) > 0:
                raise InvalidField(name, getattr(self, name), "above 0")

    @property
    def kappa(self) -> float:
        """κ = t/r: rollout GPUs for each train GPU at ρ = 1."""
        return self.train_tps_per_gpu / self.rollout_tps_per_gpu

    def rollout_gpus(self, rho: float) -> float:
        """GPUs that generate at utilization ρ, n·κρ/(1 + κρ)."""
        return self.gpus * self.kappa * rho / (1 + self.kappa * rho)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to use the budget."""

    rollout_gpus: int
    train_gpus: int
    setting: Setting
    prediction: Prediction
    period_s: float
    simulated: bool = False
    """True if `prediction` was simulated, because the closed form is rough there."""

    @property
    def noise_adjusted_s(self) -> float:
        """Period over √B."""
        return closed_forms.noise_adjusted(self.period_s, self.setting.batch_rollouts)

    @property
    def needs_simulation(self) -> bool:
        """True if the closed form does not settle it."""
        return self.setting.closed_form_is_rough and not self.simulated


@dataclass(frozen=True, slots=True)
class Slots:
    """Concurrency of a split: so many slots for each rollout GPU, or in all, whatever the split."""

    count: float
    per_gpu: bool = True

    def __post_init__(self) -> None:
        if not self.count > 0:
            raise InvalidField("concurrencies", self.count, "above 0")

    def of(self, rollout_gpus: float) -> float:
        """C of a split."""
        return self.count * rollout_gpus if self.per_gpu else self.count


def slots_per_gpu(budget: Budget, concurrency: int) -> float:
    """Slots of each rollout GPU where the balanced split (ρ = 1) has `concurrency` in all."""
    return concurrency / budget.rollout_gpus(1.0)


def choices(budget: Budget, setting: Setting, batches: Sequence[int], slots: Sequence[Slots]) -> list[Choice]:
    """Choices: every split of the GPUs with every batch (groups) and concurrency, at the same throughputs of a GPU."""
    found = []
    for rollout_gpus in range(1, budget.gpus):
        train_gpus = budget.gpus - rollout_gpus
        rollout, train = rollout_gpus * budget.rollout_tps_per_gpu, train_gpus * budget.train_tps_per_gpu
        for groups in batches:
            for tried_slots in slots:
                concurrency = max(1, round(tried_slots.of(rollout_gpus)))
                tried = replace(setting, rho=rollout / train, groups_per_batch=groups, concurrency=concurrency)
                prediction = predict(tried)
                ideal = tried.batch_rollouts * budget.mean_length / min(rollout, train)
                found.append(
                    Choice(
                        rollout_gpus=rollout_gpus,
                        train_gpus=train_gpus,
                        setting=tried,
                        prediction=prediction,
                        period_s=ideal * prediction.train_period_ratio,
                    )
                )
    return found


def frontier(found: Iterable[Choice]) -> list[Choice]:
    """The choices that no other beats in staleness and in period/√B; fastest first."""
    best: list[Choice] = []
    for choice in sorted(found, key=lambda c: (c.noise_adjusted_s, c.prediction.staleness)):
        if not best or choice.prediction.staleness < best[-1].prediction.staleness - 1e-9:
            best.append(choice)
    return best


def settled(choice: Choice, prediction: Prediction) -> Choice:
    """The choice with a simulated prediction."""
    ideal = choice.period_s / choice.prediction.train_period_ratio
    return replace(choice, prediction=prediction, period_s=ideal * prediction.train_period_ratio, simulated=True)


def recommended(front: Sequence[Choice], staleness_limit: float) -> Choice:
    """The fastest in period/√B whose staleness is within the limit; the least stale one when none is."""
    if not front:
        raise InvalidField("gpus", 0, "enough for one choice")
    within = [choice for choice in front if choice.prediction.staleness <= staleness_limit]
    if within:
        return min(within, key=lambda choice: choice.noise_adjusted_s)
    return min(front, key=lambda choice: choice.prediction.staleness)


_RHO_STEPS = 200


def train_bound_wins(budget: Budget, setting: Setting, slots: Slots) -> list[tuple[float, float]]:
    """Intervals where the train-bound split is less stale than the rollout-bound one of the same ideal period.

    They are of the latter's ρ, ends included, within 0.005 to 0.995 in steps of 0.005; GPUs are taken to be divisible.
    """

    def staleness(rho: float) -> float:
        concurrency = max(1.0, slots.of(budget.rollout_gpus(rho)))
        return predict(replace(setting, rho=rho, concurrency=concurrency)).staleness

    wins: list[tuple[int, int]] = []
    for step in range(1, _RHO_STEPS):
        rho = step / _RHO_STEPS
        if staleness(closed_forms.train_bound_twin(rho, budget.kappa)) < staleness(rho) - 1e-9:
            begin = wins.pop()[0] if wins and wins[-1][1] == step - 1 else step
            wins.append((begin, step))
    return [(low / _RHO_STEPS, high / _RHO_STEPS) for low, high in wins]


def side_in_words(wins: Sequence[tuple[float, float]], slots: Slots) -> str:
    """Sentence that says which side of balance is less stale, by `train_bound_wins`."""
    held = "per rollout GPU" if slots.per_gpu else "in all"
    same = f"of two splits of the same period with the same slots {held}"
    if not wins:
        return f"{same} the rollout-bound one (ρ < 1) is less stale"
    if wins == [(1 / _RHO_STEPS, 1 - 1 / _RHO_STEPS)]:
        return f"{same} the train-bound one (ρ > 1) is less stale"
    where = " or ".join(f"between {low:.2f} and {high:.2f}" for low, high in wins)
    return f"{same} the train-bound one (ρ > 1) is less stale where the rollout-bound one has ρ {where}"
