"""`python -m bench.lab.policies`: queue policies beside queue-drop and streaming, in eight settings.

The question is whether one is fresher than both without length bias. Every policy in every setting, at the throughput
that queue-drop has there, goes into results/staleness_lab.json, one setting into docs/images/staleness_lab.png. `floor`
is pre-queue staleness by the closed form, about what no queue can take away without preferring short groups.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from buffer_cli.staleness.lab import candidate, trial_values
from buffer_cli.staleness.output import progress
from buffer_cli.staleness.plot import plot_trials
from buffer_service.observability.estimate.closed_forms import pre_queue
from buffer_service.simulator import Workload
from buffer_service.simulator.lengths import Lognormal
from rollout_lab.comparison import Comparison, Trial, compare

_RESULTS = Path(__file__).parents[1] / "results" / "staleness_lab.json"
_IMAGE = Path(__file__).parents[2] / "docs" / "images" / "staleness_lab.png"

GROUPS_PER_BATCH, GROUP_SIZE, CONCURRENCY = 32, 8, 256
RHOS = (0.67, 0.85, 1.07, 1.5)
SIGMAS = (0.5, 1.0)
LENGTH_MEAN, LENGTH_CAP = 1_400.0, 13_200
DRAWN = (1.07, 1.0)
"""The setting in the picture: ρ, σ."""

POLICIES = (
    "queue_drop",
    "queue_drop(2)",
    "queue_drop(2) order=lifo",
    "queue_drop(2) order=stalest_first",
    "queue_drop(4) order=lifo",
    "queue_max(1)",
    "queue_max(2)",
    "queue_max(4)",
    "queue_max(4) stale_action=recycle",
    "queue_max(4) staleness_measure=tail",
    "miles",
    "areal(4)",
    "areal(1) max_inflight_groups=0",
    "areal(2) max_inflight_groups=0",
    "areal(4) max_inflight_groups=0",
    "streaming(8)",
    "streaming(4)",
    "streaming(2)",
    "streaming(1)",
    "streaming(4) order=lifo",
    "streaming(4) order=stalest_first",
    "streaming(4) max_queued_groups=32 order=lifo",
    "streaming(1) max_queued_groups=8",
    "streaming(1) max_queued_groups=8 order=lifo",
    "streaming(4) max_staleness=4",
)


def main() -> int:
    """Print and write every policy in every setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="measured train steps of a simulation (default 400)")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for sigma in SIGMAS:
        lengths = Lognormal.with_mean(LENGTH_MEAN, sigma, LENGTH_CAP)
        for rho in RHOS:
            comparison = Comparison(
                candidates=[candidate(written, GROUPS_PER_BATCH) for written in POLICIES],
                workload=Workload(CONCURRENCY, GROUP_SIZE, rho, lengths),
                steps=options.steps,
            )
            with progress(len(POLICIES), f"ρ {rho:g}, σ {sigma:g}") as done:
                trials = compare(comparison, done=done)
            tailness = lengths.tailness(GROUP_SIZE)
            floor = pre_queue(CONCURRENCY / (GROUPS_PER_BATCH * GROUP_SIZE), rho, tailness)
            _print(trials, rho, sigma, floor)
            setting = {"rho": rho, "sigma": sigma, "tailness": tailness, "floor": floor}
            rows += [{**setting, **trial_values(trial)} for trial in trials]
            if (rho, sigma) == DRAWN:
                plot_trials(trials, f"ρ {rho:g}, σ {sigma:g}, C = B = {CONCURRENCY}, G = {GROUP_SIZE}", _IMAGE)
    _RESULTS.write_text(json.dumps({"steps": options.steps, "rows": rows}, indent=1) + "\n")
    print(f"\nwritten to {_RESULTS} and {_IMAGE}")
    return 0


def _print(trials: list[Trial], rho: float, sigma: float, floor: float) -> None:
    print(f"\nρ {rho:g}, σ {sigma:g}: pre-queue staleness by the closed form {floor:.2f}")
    print(f"{'policy':46}{'mean':>6}{'p95':>5}{'max':>5}{'iqs':>6}{'bias':>8}{'wasted':>8}{'period':>8}{'engines':>9}")
    for trial in trials:
        result = trial.result
        engines = f"{trial.engines:.2f}" if trial.keeps_pace else "too slow"
        print(
            f"{trial.name:46}{result.staleness:>6.2f}{result.staleness_p95:>5}{result.staleness_max:>5}{result.iqs:>6.2f}"
            f"{result.length_bias:>+8.1%}{result.wasted_token_share:>8.0%}{trial.period:>8.2f}{engines:>9}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
