"""`python -m bench.lab.grid`: simulator against closed form, every cell, into results/staleness_grid.json.

The grid is fixed here: N = 16 groups of G = 8 (B = 128, the size of the published runs). Lengths are lognormal with σ
0.5 as in the streaming table, without a cap. Where the closed form holds (ρ <= 0.8 or >= 1.2) |difference| <= 0.15 is
asked. Beside the page's form stands the one with the period of small batches (closed_forms.small_batch_period).
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from buffer_service.observability.estimate.closed_forms import is_rough, queue_drop, queue_drop_of_small_batches
from buffer_service.simulator import Simulation, Workload, simulate
from buffer_service.simulator.lengths import Lognormal
from rollout_lab.processes import in_processes
from rollout_lab.queue_policies import QUEUE_DROP, queue_policy

RHO = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5)
QUEUE_FACTORS = (1, 2, 3)
CONCURRENCY_RATIOS = (0.5, 1.0, 2.0, 4.0)
GROUPS_PER_BATCH = 16
GROUP_SIZE = 8
LENGTHS = Lognormal.with_mean(1_400, 0.5)
TOLERANCE = 0.15
WARMUP = 200

_RESULTS = Path(__file__).parents[1] / "results" / "staleness_grid.json"


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting of the grid."""

    rho: float
    queue_factor: int
    concurrency_ratio: float

    def simulation(self, steps: int, seed: int = 0) -> Simulation:
        """The simulation of this cell."""
        responses = GROUPS_PER_BATCH * GROUP_SIZE
        return Simulation(
            policy=queue_policy(QUEUE_DROP, GROUPS_PER_BATCH, queue_factor=self.queue_factor),
            workload=Workload(round(self.concurrency_ratio * responses), GROUP_SIZE, self.rho, LENGTHS),
            steps=steps,
            warmup=WARMUP,
            seed=seed,
        )

    def closed_form(self) -> float:
        """Staleness by the closed form."""
        tailness = LENGTHS.tailness(GROUP_SIZE)
        return queue_drop(self.concurrency_ratio, self.queue_factor, self.rho, tailness).staleness

    def refined(self) -> float:
        """Staleness by the closed form with the period of batches of so few groups."""
        tailness = LENGTHS.tailness(GROUP_SIZE)
        return queue_drop_of_small_batches(
            self.concurrency_ratio, self.queue_factor, self.rho, tailness, GROUPS_PER_BATCH
        ).staleness


def grid() -> list[Cell]:
    """All cells."""
    return [Cell(rho, q, ratio) for ratio in CONCURRENCY_RATIOS for q in QUEUE_FACTORS for rho in RHO]


def main() -> int:
    """Run the grid and write it; 1 when the refined form is farther off than TOLERANCE where it is to hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=800, help=f"measured train steps of a cell, after {WARMUP} of warm-up"
    )
    parser.add_argument("--processes", type=int, default=None, help="default: one per core")
    parser.add_argument("--out", type=Path, default=_RESULTS)
    given = parser.parse_args()
    cells, started = grid(), time.perf_counter()
    show = (lambda n: print(f"\r{n}/{len(cells)}", end="", file=sys.stderr)) if sys.stderr.isatty() else None
    results = in_processes(simulate, [c.simulation(given.steps) for c in cells], processes=given.processes, done=show)
    rows = []
    for cell, result in zip(cells, results, strict=True):
        predicted = cell.closed_form()
        rows.append(
            {
                "rho": cell.rho,
                "queue_factor": cell.queue_factor,
                "concurrency_ratio": cell.concurrency_ratio,
                "closed_form": round(predicted, 3),
                "simulated": round(result.staleness, 3),
                "difference": round(result.staleness - predicted, 3),
                "refined": round(cell.refined(), 3),
                "refined_difference": round(result.staleness - cell.refined(), 3),
                "pqs": round(result.pqs, 3),
                "iqs": round(result.iqs, 3),
                "train_period_ratio": round(result.train_period_ratio, 4),
                "closed_form_rough": is_rough(cell.rho),
            }
        )
    held = [row for row in rows if not row["closed_form_rough"]]
    report = {
        "steps": given.steps,
        "warmup": WARMUP,
        "groups_per_batch": GROUPS_PER_BATCH,
        "group_size": GROUP_SIZE,
        "tailness": round(LENGTHS.tailness(GROUP_SIZE), 4),
        "lengths": {"mean": round(LENGTHS.mean, 1), "sigma": LENGTHS.sigma},
        "tolerance": TOLERANCE,
        "cells_where_it_holds": len(held),
        "beyond_tolerance": [row for row in held if abs(row["difference"]) > TOLERANCE],
        "largest_difference": max((abs(row["difference"]) for row in held), default=0.0),
        "largest_refined_difference": max((abs(row["refined_difference"]) for row in held), default=0.0),
        "largest_difference_near_balance": max(abs(row["difference"]) for row in rows if row["closed_form_rough"]),
        "largest_refined_difference_near_balance": max(
            abs(row["refined_difference"]) for row in rows if row["closed_form_rough"]
        ),
        "cells": rows,
    }
    given.out.parent.mkdir(exist_ok=True)
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    for ratio in CONCURRENCY_RATIOS:
        for q in QUEUE_FACTORS:
            line = [row["difference"] for row in rows if (row["concurrency_ratio"], row["queue_factor"]) == (ratio, q)]
            print(f"C/B {ratio:3} q {q}  " + " ".join(f"{value:+.2f}" for value in line))
    print(f"rho          {' '.join(f'{rho:5.2f}' for rho in RHO)}")
    print(
        f"{len(held)} cells where the closed form holds: largest difference {report['largest_difference']:.3f}, "
        f"{len(report['beyond_tolerance'])} beyond {TOLERANCE}; with the period of small batches "
        f"{report['largest_refined_difference']:.3f}; {time.perf_counter() - started:.0f} s; {given.out}"
    )
    return 1 if report["largest_refined_difference"] > TOLERANCE else 0


if __name__ == "__main__":
    sys.exit(main())
