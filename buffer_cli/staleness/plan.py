"""`rollout-buffer plan`: closed forms, with the simulator near balance, for one setting or for a budget of GPUs."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from buffer_cli.output import print_json
from buffer_cli.staleness.commands import LoopOptions, QueueOptions, StepOptions
from buffer_cli.staleness.lengths_file import read_lengths
from buffer_cli.staleness.output import figures, naming_options, progress, result_values
from buffer_cli.staleness.plot import plot_frontier, plot_plan
from buffer_service.observability.estimate import closed_forms
from buffer_service.observability.estimate.closed_forms import Prediction
from buffer_service.simulator import SimulationResult, simulate
from buffer_service.simulator.lengths import Empirical
from buffer_wire.errors import InvalidField
from rollout_lab import planner
from rollout_lab.planner import Budget, Choice, Setting, Slots
from rollout_lab.processes import in_processes

ROUGH = (
    "near balance (0.8 < ρ < 1.2) the closed form is rough: in-queue staleness jumps there from 1 to q; "
    "go by the simulated figures"
)
ROUGH_ADMISSION = (
    "under admission the closed form of staleness is that without a gate, and that of the period a lower bound; "
    "go by the simulated figures"
)
_BUDGET = ("gpus", "rollout_tps_per_gpu", "train_tps_per_gpu")


@naming_options
def run(
    loop: LoopOptions,
    queue: QueueOptions,
    simulation: StepOptions,
    *,
    policy: str,
    tailness: float | None,
    lengths: Path | None,
    as_json: bool,
    plot: Path | None,
    **budget: Any,  # noqa: ANN401 - what a budget of GPUs needs
) -> None:
    """Plan as the options say."""
    recorded = read_lengths(lengths) if lengths else None
    if (tailness is None) == (recorded is None):
        raise InvalidField("tailness", tailness or "unset", "given, or --lengths instead")
    if recorded:
        tailness = recorded.tailness(loop.group_size)
    setting = Setting(tailness=tailness, policy=policy, **asdict(loop), **asdict(queue))  # type: ignore[arg-type]
    named = [name for name in _BUDGET if budget[name] is not None]
    if named and len(named) < len(_BUDGET):
        missing = next(name for name in _BUDGET if budget[name] is None)
        raise InvalidField(missing, "unset", f"set together with {named[0]}")
    plan = _Plan(setting, loop.concurrency, recorded, simulation, as_json=as_json, plot=plot)
    if named:
        _for_budget(plan, budget)
    else:
        _for_setting(plan)


@dataclass(frozen=True)
class _Plan:
    """Settings of a plan, and how it is to be shown."""

    setting: Setting
    concurrency: int
    lengths: Empirical | None
    simulation: StepOptions
    as_json: bool
    plot: Path | None

    def simulated(self, settings: list[Setting]) -> list[SimulationResult]:
        """Results of the settings, in order."""
        told = asdict(self.simulation)
        simulations = [planner.simulation_of(setting, self.lengths, **told) for setting in settings]
        with progress(len(simulations), "simulating") as done:
            return in_processes(simulate, simulations, done=done)


# ── one setting ──────────────────────────────────────────────────────────────


def _for_setting(plan: _Plan) -> None:
    setting = plan.setting
    prediction = planner.predict(setting)
    rough = setting.closed_form_is_rough
    simulated = plan.simulated([setting])[0] if rough else None
    if plan.plot:
        plot_plan(setting, simulated, plan.plot)
    if plan.as_json:
        values = {**_values(prediction), "tailness": setting.tailness, "policy": setting.policy}
        values |= {"token_staleness": planner.token_staleness(setting, plan.lengths), "rho": setting.rho}
        values["closed_form_rough"] = rough
        if simulated is not None:
            values |= {"note": _note(setting), "simulated": result_values(simulated)}
        print_json(values)
        return
    console = Console(highlight=False)
    console.print(_prediction_table(setting, prediction, simulated))
    if simulated is not None:
        console.print(
            f"{_note(setting)} ({simulated.steps} steps after {simulated.warmup} of warm-up, seed {simulated.seed})"
        )
    table = Table("lever", "PQS", "IQS", "staleness", "change", "period / ideal", title="what would change it")
    for name, other in planner.levers(setting):
        change = other.staleness - prediction.staleness
        table.add_row(
            name, *figures(other.pqs, other.iqs, other.staleness), f"{change:+.2f}", f"{other.train_period_ratio:.2f}"
        )
    console.print(table)


def _note(setting: Setting) -> str:
    return ROUGH if closed_forms.is_rough(setting.rho) else ROUGH_ADMISSION


def _values(prediction: Prediction) -> dict[str, Any]:
    return {**asdict(prediction), "staleness": prediction.staleness}


def _prediction_table(setting: Setting, prediction: Prediction, simulated: SimulationResult | None) -> Table:
    title = (
        f"{setting.policy}: C {setting.concurrency}, B {setting.batch_rollouts}, ρ {setting.rho:g}, "
        f"M {setting.tailness:.3g}"
    )
    columns = ["staleness, in versions", "closed form", *(["simulated"] if simulated else [])]
    table = Table(*columns, title=title)
    names = {
        "pre-queue (generation)": "pqs",
        "in-queue": "iqs",
        "staleness": "staleness",
        "train period / ideal": "train_period_ratio",
    }
    for shown, name in names.items():
        measured = [getattr(simulated, name)] if simulated else []
        table.add_row(shown, *figures(getattr(prediction, name), *measured))
    return table


# ── a budget ─────────────────────────────────────────────────────────────────


def _for_budget(plan: _Plan, given: dict[str, Any]) -> None:
    setting = plan.setting
    mean = given["length_mean"] or (plan.lengths.mean if plan.lengths else None)
    if mean is None:
        raise InvalidField("length_mean", "unset", "given, or --lengths instead: it makes seconds of tokens")
    budget = Budget(mean_length=mean, **{name: given[name] for name in _BUDGET})
    batches = _batches(given, setting.groups_per_batch)
    slots = _slots(given, budget, plan.concurrency)
    front = _settled_frontier(plan, planner.choices(budget, setting, batches, slots))
    best = planner.recommended(front, given["staleness_limit"])
    wins = planner.train_bound_wins(budget, setting, slots[len(slots) // 2])
    side = planner.side_in_words(wins, slots[0])
    if plan.plot:
        plot_frontier(front, best, plan.plot)
    if plan.as_json:
        values = {
            "kappa": budget.kappa,
            "kappa_threshold": closed_forms.kappa_threshold(setting.queue_factor or 1.0),
            "total_concurrency": not slots[0].per_gpu,
            "train_bound_wins": wins,
            "side": side,
            "tailness": setting.tailness,
            "frontier": [_choice_values(choice) for choice in front],
            "recommended": _choice_values(best),
        }
        print_json(values)
        return
    console = Console(highlight=False)
    table = Table(
        *("", "split", "ρ", "N", "C", "C/GPU", "PQS", "IQS", "stale", "period s", "/√B s", ""),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=f"splits of {budget.gpus} GPUs, rollout+train, that none beats in staleness and in period/√B",
    )
    for choice in front:
        at, predicted = choice.setting, choice.prediction
        table.add_row(
            "→" if choice is best else "",
            f"{choice.rollout_gpus}+{choice.train_gpus}",
            f"{at.rho:.2f}",
            str(at.groups_per_batch),
            str(at.concurrency),
            f"{at.concurrency / choice.rollout_gpus:.3g}",
            *figures(predicted.pqs, predicted.iqs, predicted.staleness),
            f"{choice.period_s:.3g}",
            f"{choice.noise_adjusted_s:.3g}",
            "sim." if choice.simulated else "",
        )
    console.print(table)
    console.print(
        f"→ recommended: {best.rollout_gpus} rollout and {best.train_gpus} train GPUs, "
        f"N {best.setting.groups_per_batch}, C {best.setting.concurrency}: "
        f"the fastest in period/√B up to staleness {given['staleness_limit']:g}"
        + ("" if best.prediction.staleness <= given["staleness_limit"] else ", which none keeps: the least stale one")
    )
    console.print(side)
    if any(choice.simulated for choice in front):
        console.print("sim.: simulated, since the closed form is rough there")
    console.print("throughputs per GPU are taken to be the same at every batch and concurrency")


def _settled_frontier(plan: _Plan, found: list[Choice]) -> list[Choice]:
    """The frontier with every choice near balance on it simulated; what that displaces is looked at again."""
    while True:
        front = planner.frontier(found)
        rough = [choice for choice in front if choice.needs_simulation]
        if not rough:
            return front
        results = plan.simulated([choice.setting for choice in rough])
        known = {
            (c.rollout_gpus, c.setting): planner.settled(c, Prediction(r.pqs, r.iqs, r.train_period_ratio))
            for c, r in zip(rough, results, strict=True)
        }
        found = [known.get((choice.rollout_gpus, choice.setting), choice) for choice in found]


def _choice_values(choice: Choice) -> dict[str, Any]:
    setting = choice.setting
    return {
        "rollout_gpus": choice.rollout_gpus,
        "train_gpus": choice.train_gpus,
        "rho": setting.rho,
        "groups_per_batch": setting.groups_per_batch,
        "concurrency": setting.concurrency,
        "concurrency_per_gpu": setting.concurrency / choice.rollout_gpus,
        **_values(choice.prediction),
        "period_s": choice.period_s,
        "noise_adjusted_s": choice.noise_adjusted_s,
        "simulated": choice.simulated,
    }


def _slots(given: dict[str, Any], budget: Budget, concurrency: int) -> list[Slots]:
    total = given["total_concurrency"]
    counts = _numbers(given, "concurrencies")
    if not counts:
        middle = concurrency if total else planner.slots_per_gpu(budget, concurrency)
        counts = [middle / 2, middle, 2 * middle]
    return [Slots(count, per_gpu=not total) for count in counts]


def _numbers(given: dict[str, Any], name: str) -> list[float]:
    try:
        numbers = {float(number) for number in given[name].split(",") if number.strip()}
    except ValueError:
        raise InvalidField(name, given[name], "numbers with commas between") from None
    if not all(0 < number < math.inf for number in numbers):
        raise InvalidField(name, given[name], "numbers above 0")
    return sorted(numbers)


def _batches(given: dict[str, Any], groups_per_batch: int) -> list[int]:
    numbers = _numbers(given, "batches")
    if not all(number.is_integer() for number in numbers):
        raise InvalidField("batches", given["batches"], "whole numbers of groups")
    n = groups_per_batch
    return [int(number) for number in numbers] or sorted({max(1, n // 2), n, 2 * n, 4 * n})
