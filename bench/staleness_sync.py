"""`python -m bench.staleness_sync`: what asynchrony buys, the same loop with `sync` and with other presets.

Into results/staleness_sync.json. ρ is rollout over train throughput with every slot busy; with C/B = 1 a batch is
generated at once, with 0.25 in four waves.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from buffer_cli.lab import candidate
from buffer_cli.staleness_output import progress, result_values
from buffer_service.staleness.lengths import Lognormal
from buffer_service.staleness.simulator import Simulation, Workload
from buffer_service.staleness.simulator.grid import simulate_all

_RESULTS = Path(__file__).parent / "results" / "staleness_sync.json"

GROUPS_PER_BATCH, GROUP_SIZE = 32, 8
RHOS = (0.25, 0.67, 1.0, 1.5, 4.0)
CONCURRENCIES = (64, 256)
SIGMAS = (0.0, 0.5, 1.0)
LENGTH_MEAN, LENGTH_CAP = 1_400.0, 13_200
POLICIES = ("sync", "one_step_off", "queue_drop", "streaming(4)")


def main() -> int:
    """Print and write every setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="measured train steps of a simulation (default 300)")
    options = parser.parse_args()
    print("times as fast as sync (trainer idle, slots idle; staleness)")
    print(f"{'C/B':>5}{'σ':>5}{'ρ':>6}" + "".join(f"{name:>30}" for name in POLICIES))
    rows: list[dict[str, Any]] = []
    for concurrency in CONCURRENCIES:
        for sigma in SIGMAS:
            for rho in RHOS:
                lengths = Lognormal.with_mean(LENGTH_MEAN, sigma, LENGTH_CAP)
                workload = Workload(concurrency, GROUP_SIZE, rho, lengths)
                simulations = [
                    Simulation(policy=candidate(name, GROUPS_PER_BATCH).policy, workload=workload, steps=options.steps)
                    for name in POLICIES
                ]
                ratio = concurrency / (GROUPS_PER_BATCH * GROUP_SIZE)
                with progress(len(POLICIES), f"C/B {ratio:g}, σ {sigma:g}, ρ {rho:g}") as done:
                    results = simulate_all(simulations, done=done)
                line = f"{ratio:>5g}{sigma:>5g}{rho:>6g}"
                for name, result in zip(POLICIES, results, strict=True):
                    faster = results[0].train_period_ratio / result.train_period_ratio
                    idle = f"{result.trainer_idle_share:.0%}, {result.slot_idle_share:.0%}"
                    line += f"{f'{faster:.2f} × ({idle}; {result.staleness:.2f})':>30}"
                    setting = {"concurrency": concurrency, "sigma": sigma, "rho": rho, "policy": name}
                    rows.append({**setting, **result_values(result)})
                print(line, flush=True)
    _RESULTS.write_text(json.dumps({"steps": options.steps, "rows": rows}, indent=1) + "\n")
    print(f"\nwritten to {_RESULTS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
