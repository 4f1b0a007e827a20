"""Policies beside each other on one workload, at equal throughput.

A policy that throws groups away, or lets engines wait, is slower than another on the same engines; its staleness says
little as long as that is left out. So the first policy sets the pace, on the engines given. Every other one gets as
many more engines as it needs to keep that pace: slots and rollout throughput rise together, the trainer stays as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from buffer_service.control.decision import decide
from buffer_service.domain.policy import RunPolicy
from buffer_service.simulator import Simulation, SimulationResult, Workload, simulate
from buffer_wire.errors import InvalidField, InvalidPolicy
from rollout_lab.processes import in_processes

TOLERANCE = 0.01
"""A period is kept when it is at most so much longer: about the noise of a few hundred steps."""
MOST_ENGINES = 4.0
_BISECTIONS = 6


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy under a name."""

    name: str
    policy: RunPolicy
    workload: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the workload in place of the comparison's, for what a worker decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Result of a policy."""

    name: str
    engines: float
    """Rollout capacity that it was given, over the workload's."""
    keeps_pace: bool
    """False when no capacity up to MOST_ENGINES gave the first policy's period."""
    period: float
    """Mean train period over what the trainer alone needs for a step."""
    result: SimulationResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Question of a comparison. `steps`, `warmup` and `seed` as in a Simulation."""

    candidates: Sequence[Candidate]
    workload: Workload
    steps: int = 400
    warmup: int = 100
    seed: int = 0


def compare(
    comparison: Comparison, *, processes: int | None = None, done: Callable[[int], None] | None = None
) -> list[Trial]:
    """Simulate every candidate; returns their trials in the same order.

    The first one runs on the workload's engines, and its train period is the pace. Each other one gets about the fewest
    engines that keep this pace, from the workload's up to MOST_ENGINES times as many. One that cannot keep it is
    reported on the workload's engines. `processes`: of the others, as in `in_processes`. `done`: called with the number
    of trials that have ended.

    Raises InvalidField for fewer than two candidates, for two of one name, and for what is not simulated. Raises
    InvalidPolicy when nothing can go on.
    """
    candidates = comparison.candidates
    names = [candidate.name for candidate in candidates]
    if len(candidates) < 2:
        raise InvalidField("policy", names, "two or more, to be compared")
    if twice := {name for name in names if names.count(name) > 1}:
        raise InvalidField("policy", min(twice), "named once")
    pace = tried(comparison, candidates[0], 1.0)
    if done is not None:
        done(1)
    others = in_processes(
        partial(_matched, comparison, pace.period),
        candidates[1:],
        processes=processes,
        done=None if done is None else lambda finished: done(finished + 1),
    )
    return [pace, *others]


def _matched(comparison: Comparison, pace: float, candidate: Candidate) -> Trial:
    """The candidate with the least capacity, from the workload's on, that keeps the pace."""
    most = pace * (1 + TOLERANCE)
    trial = tried(comparison, candidate, 1.0)
    if trial.period <= most:
        return trial
    best = tried(comparison, candidate, MOST_ENGINES)
    if best.period > most:
        return replace(trial, keeps_pace=False)
    low, high = 1.0, MOST_ENGINES
    for _ in range(_BISECTIONS):
        middle = (low * high) ** 0.5
        trial = tried(comparison, candidate, middle)
        if trial.period <= most:
            best, high = trial, middle
        else:
            low = middle
    return best


def tried(comparison: Comparison, candidate: Candidate, engines: float) -> Trial:
    """The trial of a candidate with so many times the workload's engines. Raises what `compare` raises."""
    workload = comparison.workload
    slots = max(1, round(workload.concurrency * engines))
    engines = slots / workload.concurrency
    rho = workload.rho * engines
    simulation = Simulation(
        policy=candidate.policy,
        workload=replace(workload, concurrency=slots, rho=rho, **candidate.workload),
        controller=decide,
        steps=comparison.steps,
        warmup=comparison.warmup,
        seed=comparison.seed,
    )
    try:
        result = simulate(simulation)
    except (InvalidField, InvalidPolicy) as error:
        error.add_note(f"policy {candidate.name!r}")
        raise
    # The ratio is over B·L̄ / min(R, T); the trainer alone takes B·L̄ / T.
    period = result.train_period_ratio * max(1.0, 1.0 / rho)
    return Trial(name=candidate.name, engines=engines, keeps_pace=True, period=period, result=result)
