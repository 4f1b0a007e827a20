"""`python -m bench.lab.sync`: what asynchrony buys, the same loop with `sync` and with other presets.

Into results/staleness_sync.json, and docs/sync_or_async.md. ρ is rollout over train throughput of split GPUs with
every slot busy; with C/B = 1 a batch is generated at once, with 0.25 in four waves. Each setting also has the
synchronous loop on as many GPUs. All generate and then all train; they switch at no cost and have κ = 3.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench.tables import put, table
from buffer_cli.staleness.lab import candidate
from buffer_cli.staleness.output import progress, result_values
from buffer_service.simulator import Workload
from buffer_service.simulator.lengths import Lognormal
from rollout_lab.worth import Contender, Outcome, Question, Split, outcomes

_RESULTS = Path(__file__).parents[1] / "results" / "staleness_sync.json"

GROUPS_PER_BATCH, GROUP_SIZE = 32, 8
RHOS = (0.25, 0.67, 1.0, 1.5, 4.0)
CONCURRENCIES = (64, 256)
SIGMAS = (0.0, 0.5, 1.0)
LENGTH_MEAN, LENGTH_CAP = 1_400.0, 13_200
KAPPA = 3
_SYNC = candidate("sync", GROUPS_PER_BATCH).policy
CONTENDERS = (
    Contender(name="sync, shared GPUs", policy=_SYNC, is_sync=True, shares_gpus=True),
    Contender(name="sync, split GPUs", policy=_SYNC, is_sync=True),
    *(
        Contender(name=written, policy=candidate(written, GROUPS_PER_BATCH).policy)
        for written in ("one_step_off", "queue_drop", "streaming(4)")
    ),
)


def question(concurrency: int, sigma: float, rho: float, steps: int) -> Question:
    """One setting. Lengths have a cap, 9.4 times the mean, except where all are alike."""
    lengths = Lognormal.with_mean(LENGTH_MEAN, sigma, LENGTH_CAP)
    return Question(
        contenders=CONTENDERS,
        workload=Workload(concurrency, GROUP_SIZE, rho, lengths),
        # As many as give κρ rollout GPUs for each train GPU.
        split=Split(round(100 * KAPPA * rho), 100),
        steps=steps,
    )


def main() -> int:
    """Print and write every setting."""
    parser = argparse.ArgumentParser(prog="python -m bench.lab.sync", description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="measured train steps of a simulation (default 400)")
    parser.add_argument("--processes", type=int, help="simulations at once (default: one a core)")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    shown: list[tuple[object, ...]] = []
    print("times as fast as sync on shared GPUs (trainer idle, slots idle; staleness)")
    for concurrency in CONCURRENCIES:
        for sigma in SIGMAS:
            for rho in RHOS:
                ratio = f"{concurrency / (GROUPS_PER_BATCH * GROUP_SIZE):g}"
                with progress(len(CONTENDERS), f"C/B {ratio}, σ {sigma:g}, ρ {rho:g}") as done:
                    found = outcomes(
                        question(concurrency, sigma, rho, options.steps), processes=options.processes, done=done
                    )
                cells = [_cell(one, found[0]) for one in found]
                print(f"C/B {ratio}, σ {sigma:g}, ρ {rho:g}: ", "  ".join(cells), flush=True)
                shown.append((ratio, f"{sigma:g}", f"{rho:g}", *cells))
                setting = {"concurrency": concurrency, "sigma": sigma, "rho": rho}
                rows += [{**setting, **_values(one)} for one in found]
    _RESULTS.write_text(json.dumps({"steps": options.steps, "kappa": KAPPA, "rows": rows}, indent=1) + "\n")
    put("sync_simulated", table(("C/B", "σ", "ρ", *(one.name for one in CONTENDERS)), shown))
    print(f"\nwritten to {_RESULTS}")
    return 0


def _cell(one: Outcome, shared: Outcome) -> str:
    idle = f"{one.result.trainer_idle_share:.0%}, {one.slot_idle_share:.0%}"
    return f"{shared.period / one.period:.2f} × ({idle}; {one.result.staleness:.2f})"


def _values(one: Outcome) -> dict[str, Any]:
    return {
        "policy": one.contender.name,
        "period": one.period,
        "useful_gpu_share": one.useful_gpu_share,
        **result_values(one.result),
        "slot_idle_share": one.slot_idle_share,
    }


if __name__ == "__main__":
    sys.exit(main())
