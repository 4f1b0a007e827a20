"""Is asynchrony worth it? The same loop on the same GPUs: generating and training by turns, and both at once.

Of n = n_r + n_t GPUs, a split gives n_r to rollouts and n_t to training, for good. The synchronous loop on such a split
leaves each part idle while the other works. Its fair rival is the synchronous loop on shared GPUs: all n generate, then
all n train. There R' = R·n/n_r, on C' = C·n/n_r slots of the same speed, with as many times the groups in flight. T' is
T·n/n_t, so ρ' = ρ·n_t/n_r. A switch between the phases costs time.

No arrangement of n GPUs has a shorter period than B·L̄·(1/R' + 1/T'): each of them busy all the time, nothing thrown
away. A split with ρ = 1 whose parts never wait has just that period. So have shared GPUs without switches, if no
response is longer than the others. What asynchrony gains over shared GPUs is the wait for the longest response and the
switches; what it gains over a synchronous split is up to half of the period.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from buffer_service.control.decision import decide
from buffer_service.domain.policy import RunPolicy
from buffer_service.simulator import Simulation, SimulationResult, Workload, simulate
from buffer_wire.errors import InvalidField
from rollout_lab.processes import in_processes

MARGIN = 1.1
"""Asynchrony that is not so many times as fast is not called worth it: the simulation leaves more than that out."""


@dataclass(frozen=True, slots=True)
class Split:
    """GPUs for rollouts, and for training."""

    rollout_gpus: int
    train_gpus: int

    def __post_init__(self) -> None:
        for name in ("rollout_gpus", "train_gpus"):
            if getattr(self, name) < 1:
                raise InvalidField(name, getattr(self, name), "at least 1")

    def kappa(self, rho: float) -> float:
        """κ = t/r, train over rollout throughput of one GPU, where this split has that ρ."""
        return self.rollout_gpus / (self.train_gpus * rho)

    def shared(self, workload: Workload, switch_pause: float) -> Workload:
        """The loop in which all GPUs do both by turns; `switch_pause` in token times, both ways together."""
        more = (self.rollout_gpus + self.train_gpus) / self.rollout_gpus
        return replace(
            workload,
            concurrency=round(workload.concurrency * more),
            groups_in_flight=round(workload.groups_in_flight * more),
            rho=workload.rho * self.train_gpus / self.rollout_gpus,
            reload_pause=workload.reload_pause + switch_pause,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A policy, and whether all GPUs generate and train by turns with it (else they are split)."""

    name: str
    policy: RunPolicy
    is_sync: bool = False
    shares_gpus: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a contender."""

    contender: Contender
    period: float
    """Mean train period in token times: what a slot needs for a token."""
    speed: float
    """Times as fast as the fastest synchronous contender."""
    slot_idle_share: float
    """Share of the wall time, reloads and switches included."""
    useful_gpu_share: float | None
    """GPU time that generating and training the batch takes, over all that passes; None where no split is given."""
    result: SimulationResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The loop that is asked about. `steps`, `warmup` and `seed` as in a Simulation."""

    contenders: Sequence[Contender]
    workload: Workload
    """Workload of the split."""
    split: Split | None = None
    """Needed where a contender shares GPUs."""
    switch_pause: float = 0.0
    """Time of shared GPUs to change roles, there and back, for each step, in token times."""
    steps: int = 400
    warmup: int = 100
    seed: int = 0


def outcomes(
    question: Question, *, processes: int | None = None, done: Callable[[int], None] | None = None
) -> list[Outcome]:
    """Outcome of every contender, in their order. `processes` and `done` as of `in_processes`.

    Raises InvalidField where no contender is synchronous, or one shares GPUs that are not given, and for what is not
    simulated.
    """
    contenders, split = question.contenders, question.split
    if not any(one.is_sync for one in contenders):
        raise InvalidField("policy", [one.name for one in contenders], "a synchronous one among them")
    if split is None and any(one.shares_gpus for one in contenders):
        raise InvalidField("rollout_gpus", "unset", "set where GPUs are shared")
    if question.switch_pause < 0:
        raise InvalidField("switch_pause", question.switch_pause, "0 or more")
    workloads = [_workload(question, one) for one in contenders]
    simulations = [
        Simulation(
            policy=one.policy,
            workload=workload,
            steps=question.steps,
            warmup=question.warmup,
            seed=question.seed,
            controller=decide,
        )
        for one, workload in zip(contenders, workloads, strict=True)
    ]
    results = in_processes(simulate, simulations, processes=processes, done=done)
    periods = [
        result.train_period_ratio * simulation.workload.ideal_period(simulation.policy.batch_groups, question.seed)
        for simulation, result in zip(simulations, results, strict=True)
    ]
    reference = min(period for one, period in zip(contenders, periods, strict=True) if one.is_sync)
    return [
        Outcome(
            contender=one,
            period=period,
            speed=reference / period,
            slot_idle_share=1 - (1 - result.slot_idle_share) * max(0.0, 1 - workload.reload_pause / period),
            useful_gpu_share=_least_period(question, one) / period if split else None,
            result=result,
        )
        for one, workload, period, result in zip(contenders, workloads, periods, results, strict=True)
    ]


def in_words(found: Sequence[Outcome]) -> str:
    """The answer: the fastest asynchronous contender beside the fastest synchronous one."""
    asynchronous = [one for one in found if not one.contender.is_sync]
    sync = min((one for one in found if one.contender.is_sync), key=lambda one: one.period)
    if not asynchronous:
        return "nothing asynchronous was asked about"
    fastest = max(asynchronous, key=lambda one: one.speed)
    # Of those as fast, the freshest.
    best = min((one for one in asynchronous if one.speed >= fastest.speed * 0.98), key=lambda one: one.result.staleness)
    gain = (
        f"{best.contender.name} is {best.speed:.2f} times as fast as {sync.contender.name}, "
        f"at a mean staleness of {best.result.staleness:.2f}"
    )
    if best.speed < 1:
        return f"stay synchronous: {gain}"
    if best.speed < MARGIN:
        return f"hardly worth it: {gain}"
    return f"worth it if the objective stands the staleness: {gain}"


def _workload(question: Question, contender: Contender) -> Workload:
    if contender.shares_gpus and question.split is not None:
        return question.split.shared(question.workload, question.switch_pause)
    return question.workload


def _least_period(question: Question, contender: Contender) -> float:
    """B·L̄·(1/R' + 1/T'), in token times."""
    if question.split is None:
        raise TypeError("there is no split")
    workload, split = question.workload, question.split
    gpus = split.rollout_gpus + split.train_gpus
    rollout_time = workload.rollout_time(contender.policy.batch_groups, question.seed)
    return rollout_time * (split.rollout_gpus + workload.rho * split.train_gpus) / gpus
