"""`python -m bench.lab.controller`: a target of staleness, held through a jump. Into results/controller.json and docs.

Random settings, seeded; rows replace those of the same seeds. After 40 publishes engines become twice or half as fast,
or responses twice as long. Of 80 further publishes the last 30 are compared with the target, and with fixed settings: a
search over the same knobs finds the fastest of those that are as fresh.
"""

import argparse
import json
import random
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.lab.controller_live import live
from bench.tables import put, table, write_rows
from buffer_cli.staleness.output import progress
from buffer_service.control.decision import decide
from buffer_service.domain.policy import UNSET, OverflowAction, RunPolicy, StaleAction, TargetMeasure
from buffer_service.domain.steering.decisions import Decision, Outcome, Situation
from buffer_service.domain.steering.knobs import Knobs
from buffer_service.observability.estimate import closed_forms
from buffer_service.simulator import Simulation, SimulationResult, Workload, simulate
from buffer_service.simulator.lengths import Lognormal
from buffer_service.simulator.steering import Controller
from buffer_service.simulator.workload import Jump
from rollout_lab.processes import in_processes

_RESULTS = Path(__file__).parents[1] / "results" / "controller.json"

SETTINGS = 200
BEFORE, AFTER, MEASURED = 40, 80, 30
"""Publishes before the jump, after it, and the last of these that are measured."""
JUMPS = {"engines × 2": Jump(0, speed=2.0), "engines × ½": Jump(0, speed=0.5), "lengths × 2": Jump(0, length=2.0)}
NEAR, NEAR_SHARE = 0.25, 0.15
"""Versions, or share of the target, by which a mean counts as held."""
GOOD = 0.97
"""Throughput over that of the best fixed setting that is good enough."""
NOISE = 0.02
"""Versions by which a fixed setting may be staler than the controller and count as as fresh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A random setting. Picklable."""

    seed: int
    jump: str
    policy: RunPolicy
    workload: Workload

    @property
    def target(self) -> float:
        """Target, in versions."""
        return self.policy.target_staleness_milli / 1_000

    @property
    def near(self) -> float:
        """Versions that the mean may be off."""
        return max(NEAR, NEAR_SHARE * self.target)

    def run(self, controller: Controller) -> SimulationResult:
        """Simulate with a controller."""
        b = self.policy.batches_per_publish
        simulation = Simulation(
            policy=self.policy,
            workload=self.workload,
            steps=MEASURED * b,
            warmup=(BEFORE + AFTER - MEASURED) * b,
            seed=self.seed,
            controller=controller,
            jump=replace(JUMPS[self.jump], step=BEFORE * b),
        )
        return simulate(simulation)

    def mean(self, result: SimulationResult) -> float:
        """Mean staleness by the target's measure."""
        return result.token_staleness if self.policy.target_measure is TargetMeasure.TOKEN else result.staleness


def drawn(seed: int) -> Setting:
    """The setting of a seed; its target is a share of the staleness that the closed form predicts after the jump."""
    rng = random.Random(seed)
    n, g = rng.choice((8, 16, 32)), rng.choice((4, 8))
    ratio, rho = 0.5 * 6 ** rng.random(), 0.5 * 4 ** rng.random()
    lengths = Lognormal.with_mean(1_400.0, rng.uniform(0.3, 1.0), 13_200)
    q, micro = rng.choice((1, 2, 4)), rng.choice((0, 0, n // 4, n // 8))
    d, b = rng.choice((0, 0, 1, 2)), rng.choice((1, 1, 1, 2))
    jump = rng.choice(tuple(JUMPS))
    lag = rng.choice((0.0, 0.0, 0.03, 0.2, 0.6))
    workload = Workload(max(1, round(ratio * n * g)), g, rho, lengths)
    workload = replace(workload, publish_lag=lag * b * workload.ideal_period(n, 0))
    after = rho * JUMPS[jump].speed
    form = closed_forms.queue_drop(ratio / b, max(1.0, q / b), after, lengths.tailness(g))
    target = max(0.1, rng.uniform(0.2, 1.15) * form.staleness)
    policy = RunPolicy(
        batch_groups=n,
        max_queued_groups=q * n,
        micro_batch_groups=micro,
        overflow_action=rng.choice((OverflowAction.DROP_OLDEST, OverflowAction.BLOCK)),
        prefetch_batches=d,
        batches_per_publish=b,
        max_staleness=rng.choice((UNSET, UNSET, UNSET, int(target) + 2)),
        stale_action=rng.choice((StaleAction.DROP, StaleAction.RECYCLE)),
        target_staleness_milli=round(1_000 * target),
        target_measure=rng.choice(tuple(TargetMeasure)),
    )
    return Setting(seed=seed, jump=jump, policy=policy, workload=workload)


@dataclass(frozen=True, slots=True)
class Tried:
    """A fixed setting that was simulated."""

    knobs: Knobs
    mean: float
    period: float


def searched(setting: Setting, as_fresh: float) -> Iterator[Tried]:
    """Fixed settings: none of the values lowered, all at their least, and by bisection the widest that are as fresh.

    Bisected is the lookahead, with the micro-batches as stated and small, and the limit in flight, which is at least a
    batch, as the controller's.
    """
    policy, target = setting.policy, setting.policy.target_staleness_milli
    n, slots = policy.batch_groups, setting.workload.concurrency // setting.workload.group_size
    small = max(1, n // 8) if policy.micro_batch_groups else 0

    def tried(**knobs: int) -> Tried:
        result = setting.run(partial(_fixed, Knobs(**knobs)))
        return Tried(Knobs(**knobs), setting.mean(result), result.train_period_ratio)

    def bisected(name: str, low: int, high: int, tries: int, **knobs: int) -> Iterator[Tried]:
        for _ in range(tries):
            if high <= low:
                return
            middle = (low + high + 1) // 2
            one = tried(**{name: middle}, **knobs)
            yield one
            low, high = (middle, high) if one.mean <= as_fresh else (low, middle - 1)

    yield tried()
    yield tried(lookahead_milli=0, max_inflight_groups=n, micro_batch_groups=small)
    yield tried(max_queued_groups=n)
    for micro in {0, small}:
        yield from bisected("lookahead_milli", 0, round(1.6 * target), 6, micro_batch_groups=micro)
    yield from bisected("max_inflight_groups", n, 2 * slots, 4, micro_batch_groups=small)


def _fixed(knobs: Knobs, situation: Situation) -> Decision:
    return Decision(version=situation.version, knobs=knobs)


def row(setting: Setting) -> dict[str, Any]:
    """Row of a setting: the controller beside the best fixed one."""
    decisions: list[Decision] = []

    def controlled(situation: Situation) -> Decision:
        decisions.append(decide(situation))
        return decisions[-1]

    result = setting.run(controlled)
    mean = setting.mean(result)
    as_fresh = max(setting.target, mean) + NOISE
    fixed = list(searched(setting, as_fresh))
    best = min((one for one in fixed if one.mean <= as_fresh), key=lambda one: one.period, default=None)
    least = min(one.mean for one in fixed)
    last = [one.outcome for one in decisions[-MEASURED:]]
    policy, work = setting.policy, setting.workload
    return {
        "seed": setting.seed,
        "jump": setting.jump,
        "n": policy.batch_groups,
        "g": work.group_size,
        "c": work.concurrency,
        "rho": round(work.rho, 3),
        "tailness": round(work.lengths.tailness(work.group_size), 2),
        "q": policy.max_queued_groups // policy.batch_groups,
        "micro": policy.micro_batch_groups,
        "prefetch": policy.prefetch_batches,
        "per_publish": policy.batches_per_publish,
        "overflow": policy.overflow_action.value,
        "eta": policy.max_staleness,
        "lag": round(work.publish_lag / policy.batches_per_publish / work.ideal_period(policy.batch_groups, 0), 3),
        "measure": policy.target_measure.value,
        "target": setting.target,
        "mean": round(mean, 3),
        "held": abs(mean - setting.target) <= setting.near,
        "outcome": Counter(last).most_common(1)[0][0].value,
        "named": Outcome.OUT_OF_REACH in last,
        "open": Outcome.OPEN in last,
        "reachable": least <= setting.target + setting.near,
        "natural": round(fixed[0].mean, 3),
        "least": round(least, 3),
        "moves": decisions[-1].moves,
        "last_moves": sum(one is Outcome.MOVED for one in last),
        "period": round(result.train_period_ratio, 4),
        "best_period": None if best is None else round(best.period, 4),
        "best": None if best is None else asdict(best.knobs),
        "wasted": round(result.wasted_token_share, 4),
        "reason": decisions[-1].reason,
    }


def main() -> int:
    """Print and write every setting; 1 when a reachable target was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.lab.controller", description=__doc__)
    parser.add_argument("--settings", type=int, default=SETTINGS, help=f"random settings (default {SETTINGS})")
    parser.add_argument("--first", type=int, default=0, help="seed of the first (default 0)")
    parser.add_argument(
        "--live",
        nargs="*",
        type=int,
        help="live loops of these numbers instead, or all (about 8 minutes, quiet machine)",
    )
    parser.add_argument("--processes", type=int, help="simulations at once (default: one a core)")
    options = parser.parse_args()
    if options.live is not None:
        return _live(options.live)
    asked = [drawn(seed) for seed in range(options.first, options.first + options.settings)]
    with progress(len(asked), "settings") as done:
        rows = in_processes(row, asked, processes=options.processes, done=done)
    written = _written()
    others = written.get("rows", [])
    seeds = {one["seed"] for one in rows}
    rows = sorted([*rows, *(one for one in others if one["seed"] not in seeds)], key=lambda one: one["seed"])
    write_rows(_RESULTS, written | {"rows": rows})
    lines = list(_summary(rows))
    put("controller_simulated", table(_HEAD, lines))
    for line in lines:
        print(*line, sep="  ")
    print(f"written to {_RESULTS}")
    return int(any(_missed(one) for one in rows))


def _written() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_RESULTS.read_text()) if _RESULTS.exists() else {}
    return found


def _live(numbers: Sequence[int]) -> int:
    for got in live(numbers):
        name = got["setting"]["name"]
        print(name, got["reason"], sep="  ", flush=True)
        others = [one for one in _written().get("live", []) if one["setting"]["name"] != name]
        write_rows(_RESULTS, _written() | {"live": [*others, got]})
    shown = [_live_row(got) for got in _written()["live"]]
    head = ("live", "target", "mean", "held", "outcome", "moves", "lookahead", "period", "trainer waits")
    put("controller_live", table(head, shown))
    return int(any(row[3] == "no" and row[4] != "open" for row in shown))


def _live_row(got: dict[str, Any]) -> tuple[object, ...]:
    setting, figures = got["setting"], got["got"]
    by_token = setting["fields"].get("target_measure") == "token"
    mean = figures["token_staleness" if by_token else "staleness"]
    target = setting["fields"]["target_staleness_milli"] / 1_000
    return (
        setting["name"],
        f"{target:g}",
        f"{mean:.2f}",
        "yes" if abs(mean - target) <= max(NEAR, NEAR_SHARE * target) else "no",
        got["outcome"].replace("_", " "),
        got["moves"],
        "-" if got["max_lookahead"] is None else f"{got['max_lookahead']:.2f}",
        f"{figures['period_s']:.2f} s",
        f"{figures['trainer_idle_share']:.0%}",
    )


def _fresher(one: dict[str, Any]) -> bool:
    return bool(one["open"]) and one["mean"] < one["target"]


def _missed(one: dict[str, Any]) -> bool:
    return one["reachable"] and not one["held"] and not _fresher(one)


_HEAD = (
    "jump",
    "settings",
    "reachable",
    "held",
    "fresher, open",
    "missed",
    "out of reach, named",
    "reachable, named",
    "off by",
    "throughput over the best fixed: median",
    "0.97 or more",
    "least",
    "moves",
    "in the last 30",
)


def _summary(rows: list[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    for jump in (*JUMPS, "all"):
        those = [one for one in rows if jump in {one["jump"], "all"}]
        reachable = [one for one in those if one["reachable"]]
        beyond = [one for one in those if not one["reachable"]]
        held = [one for one in reachable if one["held"]]
        ratios = [one["best_period"] / one["period"] for one in reachable if one["best_period"]]
        if not held or not ratios:
            continue
        yield (
            jump,
            len(those),
            len(reachable),
            len(held),
            sum(_fresher(one) and not one["held"] for one in reachable),
            sum(map(_missed, those)),
            f"{sum(one['named'] for one in beyond)} of {len(beyond)}",
            sum(one["named"] for one in reachable if not one["held"]),
            f"{statistics.mean(abs(one['mean'] - one['target']) for one in held):.2f}",
            f"{statistics.median(ratios):.3f}",
            f"{sum(ratio >= GOOD for ratio in ratios) / len(ratios):.0%}",
            f"{min(ratios):.2f}",
            f"{statistics.mean(one['moves'] for one in those):.1f}",
            f"{statistics.mean(one['last_moves'] for one in those):.2f}",
        )


if __name__ == "__main__":
    sys.exit(main())
