"""`python -m bench.lab.fresh`: the same loop with fresh starts and without. Into results/staleness_fresh.json.

Simulated: presets by ρ and by the lag of a load, over several seeds. With --live also live loops (bench/live_loop),
which take turns: reloads of 0.05 and 2 s, short against the period, and one of 15 s, which is not, so nobody waits.
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.live_loop.loop import Measured, run
from bench.live_loop.setting import Setting
from bench.tables import put, table, write_rows
from buffer_cli.staleness.lab import candidate
from buffer_cli.staleness.output import progress, result_values
from buffer_service.domain.policy import RunPolicy
from buffer_service.simulator import Simulation, SimulationResult, Workload, simulate
from buffer_service.simulator.lengths import Lognormal
from rollout_lab.processes import in_processes

_RESULTS = Path(__file__).parents[1] / "results" / "staleness_fresh.json"

N, GROUP_SIZE, CONCURRENCY = 32, 8, 256
LENGTHS = Lognormal.with_mean(1_400.0, 0.5, 13_200)
POLICIES = ("queue_drop(1)", "streaming(4)", "queue_max(2)", "areal(4) max_inflight_groups=0", "one_step_off")
RHOS = (0.7, 1.0, 1.4)
LAGS = (0.005, 0.03, 0.1)
"""Shares of the ideal period."""
SEEDS = 4
OFF, ON = 0, 30_000
"""fresh_start_ms."""

LIVE = (
    *(
        Setting(name=f"{preset}, reload 0.05 s", preset=preset, rho=1.0, load_s=0.05, tokens_per_s=120.0)
        for preset in ("queue_drop(1)", "areal(1)", "one_step_off")
    ),
    Setting(name="areal(1), reload 2 s", preset="areal(1)", rho=1.0, load_s=2.0, tokens_per_s=6.0),
    Setting(name="areal(1), reload 15 s", preset="areal(1)", rho=1.0, load_s=15.0, tokens_per_s=6.0),
)
LIVE_S = 120.0
"""Time of a live run, in seconds, at the ideal period; at least eight steps."""


def simulations(steps: int) -> list[tuple[str, float, float, list[Simulation]]]:
    """Policy, ρ, lag, and the simulations of it: for each seed without fresh starts, then with them."""
    found = []
    for written in POLICIES:
        policy = candidate(written, N).policy
        for rho in RHOS:
            period = Workload(CONCURRENCY, GROUP_SIZE, rho, LENGTHS).ideal_period(N, 0)
            for lag in LAGS:
                workload = Workload(CONCURRENCY, GROUP_SIZE, rho, LENGTHS, publish_lag=lag * period)
                found.append((written, rho, lag, [_one(policy, workload, steps, seed) for seed in range(SEEDS)]))
    return found


def _one(policy: RunPolicy, workload: Workload, steps: int, seed: int) -> Simulation:
    return Simulation(policy=policy, workload=workload, steps=steps, warmup=steps // 5, seed=seed)


def _pair(simulation: Simulation) -> tuple[SimulationResult, SimulationResult]:
    off, on = (
        simulate(replace(simulation, policy=replace(simulation.policy, fresh_start_ms=limit_ms)))
        for limit_ms in (OFF, ON)
    )
    return off, on


def _simulated(steps: int, processes: int | None) -> list[dict[str, Any]]:
    asked = simulations(steps)
    flat = [one for *_, seeds in asked for one in seeds]
    with progress(len(flat), "simulations") as done:
        pairs = in_processes(_pair, flat, processes=processes, done=done)
    rows, shown = [], []
    for index, (written, rho, lag, _) in enumerate(asked):
        found = pairs[index * SEEDS : (index + 1) * SEEDS]
        rows.append(
            {
                "policy": written,
                "rho": rho,
                "lag": lag,
                "off": [result_values(off) for off, _ in found],
                "on": [result_values(on) for _, on in found],
            }
        )
        periods = [on.train_period_ratio / off.train_period_ratio - 1 for off, on in found]
        shown.append(
            (
                f"`{written}`",
                f"{rho:g}",
                f"{lag:g}",
                *(
                    _change([(getattr(off, name), getattr(on, name)) for off, on in found], form)
                    for name, form in _SHOWN
                ),
                f"{statistics.mean(periods):+.1%} ± {statistics.stdev(periods):.1%}".replace("-", "−"),
            )
        )
    # The page has the longest lag alone.
    put("fresh_simulated", table(_HEAD, [row for row in shown if row[2] == f"{LAGS[-1]:g}"]))
    return rows


_SHOWN = (("staleness", ".2f"), ("token_staleness", ".2f"), ("wasted_token_share", ".1%"))
_HEAD = ("policy", "ρ", "lag, periods", "staleness", "of tokens", "tokens wasted", "period")


def _change(pairs: list[tuple[float, float]], form: str) -> str:
    return " → ".join(format(statistics.mean(side), form) for side in zip(*pairs, strict=True))


def _live() -> list[dict[str, Any]]:
    rows, shown = [], []
    for setting in LIVE:
        steps = max(8, round(LIVE_S / setting.ideal_period_s))
        off, on = (_run(replace(setting, fields={"fresh_start_ms": limit_ms}), steps) for limit_ms in (OFF, ON))
        rows.append({"setting": asdict(setting), "off": asdict(off), "on": asdict(on)})
        shown.append(
            (
                f"`{setting.name}`".replace(",", "`,", 1).rstrip("`"),
                f"{off.publish_lag_s / off.period_s:.2f}",
                f"{off.staleness:.2f} → {on.staleness:.2f}",
                f"{off.stale_groups} → {on.stale_groups}",
                f"{off.period_s:.2f} s → {on.period_s:.2f} s",
                steps,
            )
        )
        print(*shown[-1], sep="  ", flush=True)
    head = ("live", "publish to loaded, periods", "staleness", "groups too stale", "period", "steps")
    put("fresh_live", table(head, shown))
    return rows


def _run(setting: Setting, steps: int) -> Measured:
    with tempfile.TemporaryDirectory(prefix="rollout-buffer-live-") as directory:
        return run(setting, Path(directory), steps=steps, warmup=max(3, steps // 8))


def main() -> int:
    """Print and write both."""
    parser = argparse.ArgumentParser(prog="python -m bench.lab.fresh", description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="measured train steps of a simulation (default 400)")
    parser.add_argument("--processes", type=int, help="simulations at once (default: one a core)")
    parser.add_argument("--live", action="store_true", help="live loops too (about half an hour, quiet machine)")
    options = parser.parse_args()
    written = json.loads(_RESULTS.read_text()) if _RESULTS.exists() else {}
    written |= {"steps": options.steps, "simulated": _simulated(options.steps, options.processes)}
    if options.live:
        written["live"] = _live()
    write_rows(_RESULTS, written)
    print(f"written to {_RESULTS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
