"""`python -m bench.staleness_published`: every published figure beside ours, into results/staleness_published.json.

The figures are those of "Predicting and Controlling Staleness in Fully Asynchronous RL Training" (Applied Compute,
July 2026): staleness of four real runs, and length bias in the authors' simulator. The lengths of that simulator are
known by a "tailness" of 50 or 90 and by the means that were sampled; FITTED are lognormal parameters that give these
and what was trained. We do not know the group size, concurrency and utilization of the bias figures: ours are below.
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buffer_service.staleness.closed_forms import queue_drop
from buffer_service.staleness.lengths import Lognormal
from buffer_service.staleness.queue_policies import QUEUE_DROP, QUEUE_MAX, queue_policy
from buffer_service.staleness.simulator import Simulation, Workload
from buffer_service.staleness.simulator.grid import simulate_all

_RESULTS = Path(__file__).parent / "results" / "staleness_published.json"

GROUP_SIZE = 8


@dataclass(frozen=True, slots=True)
class Run:
    """A published training run: its setting, the authors' prediction, and what was measured."""

    concurrency: int
    batch_rollouts: int
    queue_factor: int
    rho: float
    tailness: float
    predicted: float
    measured: float

    def closed_form(self) -> float:
        """Ours."""
        ratio = self.concurrency / self.batch_rollouts
        return queue_drop(ratio, self.queue_factor, self.rho, self.tailness).staleness

    def simulation(self, steps: int, seed: int = 0) -> Simulation:
        """With lognormal lengths of that tailness."""
        return Simulation(
            policy=queue_policy(QUEUE_DROP, self.batch_rollouts // GROUP_SIZE, queue_factor=self.queue_factor),
            workload=Workload(
                self.concurrency, GROUP_SIZE, self.rho, Lognormal.with_tailness(self.tailness, GROUP_SIZE)
            ),
            steps=steps,
            warmup=100,
            seed=seed,
        )


RUNS = (
    Run(120, 240, 2, 0.63, 1.42, 1.34, 1.26),
    Run(128, 128, 2, 1.07, 1.44, 3.29, 3.09),
    Run(120, 120, 1, 0.67, 1.42, 1.95, 1.92),
    Run(128, 128, 1, 1.14, 1.45, 2.24, 2.01),
)

BIAS_RHO = 1.0
BIAS_GROUPS_PER_BATCH = 16
BIAS_CONCURRENCY = 128

UNCAPPED_MEAN = 1_404.0
LENGTH_CAP = 13_200
SIGMAS = {50: 0.65, 90: 1.2}

FITTED = {
    tailness: Lognormal(math.log(UNCAPPED_MEAN) - sigma**2 / 2, sigma, LENGTH_CAP) for tailness, sigma in SIGMAS.items()
}
"""By published tailness. One mean and one cap for both: the cap alone makes the mean of 90 the lower one."""


@dataclass(frozen=True, slots=True)
class Bias:
    """A published row: mean lengths trained and sampled; max_staleness None: queue-drop."""

    tailness: int
    max_staleness: int | None
    trained: float
    sampled: float

    @property
    def share(self) -> float:
        """Trained over sampled."""
        return self.trained / self.sampled

    def simulation(self, steps: int, seed: int = 0) -> Simulation:
        """In our setting."""
        name, factor = (QUEUE_DROP, 1) if self.max_staleness is None else (QUEUE_MAX, None)
        return Simulation(
            policy=queue_policy(name, BIAS_GROUPS_PER_BATCH, queue_factor=factor, max_staleness=self.max_staleness),
            workload=Workload(BIAS_CONCURRENCY, GROUP_SIZE, BIAS_RHO, FITTED[self.tailness]),
            steps=steps,
            warmup=100,
            seed=seed,
        )


BIASES = (
    Bias(50, None, 1403, 1404),
    Bias(50, 1, 1229, 1401),
    Bias(50, 2, 1259, 1399),
    Bias(50, 4, 1351, 1402),
    Bias(90, None, 1344, 1349),
    Bias(90, 1, 897, 1352),
    Bias(90, 2, 962, 1352),
    Bias(90, 4, 1077, 1352),
)


def main() -> int:
    """Print and write every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600, help="measured train steps of a row")
    parser.add_argument("--processes", type=int, default=None, help="default: one per core")
    parser.add_argument("--out", type=Path, default=_RESULTS)
    given = parser.parse_args()
    results = simulate_all([row.simulation(given.steps) for row in (*RUNS, *BIASES)], processes=given.processes)
    runs: list[dict[str, Any]] = []
    for run, result in zip(RUNS, results, strict=False):
        runs.append(
            {
                **{name: getattr(run, name) for name in Run.__slots__},
                "closed_form": round(run.closed_form(), 3),
                "closed_form_minus_predicted": round(run.closed_form() - run.predicted, 3),
                "closed_form_minus_measured": round(run.closed_form() - run.measured, 3),
                "simulated": round(result.staleness, 3),
                "simulated_minus_measured": round(result.staleness - run.measured, 3),
            }
        )
        print(
            f"C {run.concurrency} B {run.batch_rollouts} q {run.queue_factor} ρ {run.rho} M {run.tailness}: published "
            f"{run.predicted} predicted, {run.measured} measured; ours {run.closed_form():.2f} closed form, "
            f"{result.staleness:.2f} simulated"
        )
    biases: list[dict[str, Any]] = []
    for bias, result in zip(BIASES, results[len(RUNS) :], strict=True):
        ours = 1 + result.length_bias
        biases.append(
            {
                **{name: getattr(bias, name) for name in Bias.__slots__},
                "trained_share": round(bias.share, 4),
                "our_trained": round(result.trained_mean_length, 1),
                "our_sampled": round(result.sampled_mean_length, 1),
                "our_trained_share": round(ours, 4),
                "difference_points": round(100 * (ours - bias.share), 2),
                "our_sampled_max": result.sampled_max_length,
                "our_trained_max": result.trained_max_length,
            }
        )
        name = "queue-drop" if bias.max_staleness is None else f"queue-max {bias.max_staleness}"
        print(
            f"tailness {bias.tailness} {name}: published {bias.share:.3f}, ours {ours:.3f} "
            f"({result.trained_mean_length:.0f} of {result.sampled_mean_length:.0f})"
        )
    report = {
        "steps": given.steps,
        "runs": runs,
        "bias_setting": {
            "group_size": GROUP_SIZE,
            "groups_per_batch": BIAS_GROUPS_PER_BATCH,
            "concurrency": BIAS_CONCURRENCY,
            "rho": BIAS_RHO,
            "uncapped_mean": UNCAPPED_MEAN,
            "length_cap": LENGTH_CAP,
            "sigma_by_tailness": SIGMAS,
            "mean_by_tailness": {tailness: round(lengths.mean, 1) for tailness, lengths in FITTED.items()},
        },
        "bias": biases,
    }
    given.out.parent.mkdir(exist_ok=True)
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
