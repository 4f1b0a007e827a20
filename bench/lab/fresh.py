"""`python -m bench.lab.fresh`: the same loop with fresh starts and without. Into results/staleness_fresh.json.

Simulated: presets by ρ and by the lag of a load, over several seeds. With --live live loops instead (bench/live_loop),
both ways side by side: reloads of 0.05 and 2 s, short against the period, and one of 15 s, which is not, so nobody
waits. With --sglang a loop on two real engines, whose windows take turns.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from bench.live_loop.loop import Measured, run
from bench.live_loop.real import GROUPS, windows
from bench.live_loop.setting import Setting
from bench.tables import put, table, write_rows
from buffer_cli.staleness.lab import candidate
from buffer_cli.staleness.output import progress, result_values
from buffer_service.domain.policy import RunPolicy
from buffer_service.simulator import Simulation, SimulationResult, Workload, simulate
from buffer_service.simulator.lengths import Lognormal
from rollout_lab.processes import in_processes
from trainer_client.policy import Policy

_RESULTS = Path(__file__).parents[1] / "results" / "staleness_fresh.json"

N, GROUP_SIZE, CONCURRENCY = 32, 8, 256
LENGTHS = Lognormal.with_mean(1_400.0, 0.5, 13_200)
POLICIES = (
    "queue_drop(1)",
    "streaming(4)",
    "queue_max(2)",
    "areal(4) max_inflight_groups=0",
    "one_step_off",
    "queue_drop(2) max_lookahead=1",
)
RHOS = (0.7, 1.0, 1.4)
LAGS = (0.005, 0.03, 0.1)
"""Shares of the ideal period."""
SEEDS = 4
OFF, ON = 0, 30_000
"""fresh_start_ms."""


@dataclass(frozen=True, slots=True)
class Live:
    """A setting that is run live, several times each way."""

    setting: Setting
    seeds: int = 2
    steps: int = 40
    at_once: bool = False
    """True for loops so slow that all runs of such settings go at the same time; else the two ways of a seed do."""


def _fields(written: str) -> tuple[str, dict[str, int]]:
    """The preset of a policy as it is written, and the fields on top."""
    preset, *words = written.split()
    return preset, {name: int(value) for name, value in (word.split("=") for word in words)}


def _live_setting(written: str, load_s: float, tokens_per_s: float) -> Setting:
    preset, fields = _fields(written)
    name = f"`{written}`, reload {load_s:g} s"
    return Setting(name=name, preset=preset, fields=fields, rho=1.0, load_s=load_s, tokens_per_s=tokens_per_s)


LIVE = (
    *(
        Live(_live_setting(written, 0.05, 120.0))
        for written in ("queue_drop(1)", "areal(1)", "one_step_off", "queue_drop(2) max_lookahead=1")
    ),
    Live(_live_setting("queue_drop(1)", 2.0, 6.0), steps=10, at_once=True),
    Live(_live_setting("areal(1)", 2.0, 6.0), steps=10, at_once=True),
    Live(_live_setting("one_step_off", 2.0, 9.0), steps=10, at_once=True),
    Live(_live_setting("queue_drop(2) max_lookahead=1", 2.0, 9.0), steps=10, at_once=True),
    Live(_live_setting("areal(1)", 15.0, 6.0), steps=6, at_once=True),
    Live(_live_setting("one_step_off", 15.0, 9.0), steps=6, at_once=True),
)
"""Periods of 1 to 2 s, of 20 to 45 s, and of about 40 to 60 s."""


REAL = ("queue_drop(1)", "one_step_off", "queue_drop(2) max_lookahead=1")
REAL_STEPS, REAL_TURNS = 4, (OFF, ON, ON, OFF, OFF, ON)


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


def _simulated(steps: int, processes: int | None, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of all simulations; those that are known are not made again."""
    rows = {(row["policy"], row["rho"], row["lag"]): row for row in known}
    asked = [one for one in simulations(steps) if one[:3] not in rows]
    flat = [one for *_, seeds in asked for one in seeds]
    with progress(len(flat), "simulations") as done:
        pairs = in_processes(_pair, flat, processes=processes, done=done)
    for index, (written, rho, lag, _) in enumerate(asked):
        found = pairs[index * SEEDS : (index + 1) * SEEDS]
        rows[written, rho, lag] = {
            "policy": written,
            "rho": rho,
            "lag": lag,
            "off": [result_values(off) for off, _ in found],
            "on": [result_values(on) for _, on in found],
        }
    wanted = [rows[one[:3]] for one in simulations(steps)]
    # The page has the longest lag alone.
    put("fresh_simulated", table(_HEAD, [_simulated_line(row) for row in wanted if row["lag"] == LAGS[-1]]))
    return wanted


def _simulated_line(row: dict[str, Any]) -> tuple[object, ...]:
    pairs = list(zip(row["off"], row["on"], strict=True))
    periods = [on["train_period_ratio"] / off["train_period_ratio"] - 1 for off, on in pairs]
    return (
        f"`{row['policy']}`",
        f"{row['rho']:g}",
        f"{row['lag']:g}",
        *(_change([(off[name], on[name]) for off, on in pairs], form) for name, form in _SHOWN),
        f"{statistics.mean(periods):+.1%} ± {statistics.stdev(periods):.1%}".replace("-", "−"),
    )


_SHOWN = (("staleness", ".2f"), ("token_staleness", ".2f"), ("wasted_token_share", ".1%"))
_HEAD = ("policy", "ρ", "lag, periods", "staleness", "of tokens", "tokens wasted", "period")


def _change(pairs: list[tuple[float, float]], form: str) -> str:
    return " → ".join(format(statistics.mean(side), form) for side in zip(*pairs, strict=True))


def _live(known: list[dict[str, Any]], minutes: float) -> list[dict[str, Any]]:
    """Live runs: those known already, of these very settings, and those that are begun within so many minutes."""
    until = time.monotonic() + 60 * minutes
    runs: list[tuple[Live, dict[str, Any]]] = [
        (live, {"setting": asdict(_limited(live.setting, limit_ms)), "seed": seed})
        for live in LIVE
        for seed in range(live.seeds)
        for limit_ms in (OFF, ON)
    ]
    rows = {json.dumps(asked): row for _, asked in runs for row in known if row.items() >= asked.items()}
    pieces: dict[object, list[tuple[Live, dict[str, Any]]]] = {}
    for live, asked in runs:
        if json.dumps(asked) not in rows:
            pieces.setdefault(live.at_once or (live.setting.name, asked["seed"]), []).append((live, asked))
    for piece in pieces.values():
        if time.monotonic() >= until:
            break
        with ThreadPoolExecutor(len(piece)) as threads:
            for (_, asked), measured in zip(piece, threads.map(_run, piece), strict=True):
                rows[json.dumps(asked)] = asked | {"measured": asdict(measured)}
                print(asked["setting"]["name"], asked["setting"]["fields"], asked["seed"], measured, flush=True)
    done = [rows[key] for _, asked in runs if (key := json.dumps(asked)) in rows]
    print(f"{len(done)} of {len(runs)} live runs are done")
    return done


def _limited(setting: Setting, limit_ms: int) -> Setting:
    return replace(setting, fields={**setting.fields, "fresh_start_ms": limit_ms})


def _real(sglang_python: Path, only: str) -> list[dict[str, Any]]:
    """Windows of runs on real engines, as rows of live runs: the pairs that follow each other share a seed."""
    rows = []
    for written in REAL:
        if only not in written:
            continue
        preset, fields = _fields(written)
        policy = Policy(preset=preset, batch_groups=GROUPS, **fields)  # type: ignore[arg-type]
        with tempfile.TemporaryDirectory(prefix="rollout-buffer-real-") as directory:
            turns = [{"fresh_start_ms": limit_ms} for limit_ms in REAL_TURNS]
            found = windows(policy, turns, Path(directory), sglang_python=sglang_python, steps=REAL_STEPS)
        for number, (turn, measured) in enumerate(zip(turns, found, strict=True)):
            setting = {"name": _real_name(written), "fields": turn}
            rows.append({"setting": setting, "seed": number // 2, "measured": measured})
            print(rows[-1], flush=True)
    return rows


def _real_name(written: str) -> str:
    return f"`{written}`, two SGLang engines"


def _run(piece: tuple[Live, dict[str, Any]]) -> Measured:
    live, asked = piece
    with tempfile.TemporaryDirectory(prefix="rollout-buffer-live-") as directory:
        warmup = max(2, live.steps // 6)
        return run(Setting(**asked["setting"]), Path(directory), steps=live.steps, warmup=warmup, seed=asked["seed"])


_LIVE_HEAD = (
    *("live", "publish to loaded, periods", "staleness", "of tokens", "groups too stale", "period, s", "its change"),
    "runs",
)


def _live_lines(rows: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    named = [(live.setting.name, live.steps) for live in LIVE] + [(_real_name(written), REAL_STEPS) for written in REAL]
    return [line for name, steps in named if (line := _live_line(name, steps, rows))]


def _live_line(name: str, steps: int, rows: list[dict[str, Any]]) -> tuple[object, ...] | None:
    """Line of the setting's runs that have both sides."""
    of_limit: dict[int, dict[int, dict[str, Any]]] = {OFF: {}, ON: {}}
    for row in rows:
        if row["setting"]["name"] == name:
            of_limit[row["setting"]["fields"]["fresh_start_ms"]][row["seed"]] = row["measured"]
    pairs = [(of_limit[OFF][seed], of_limit[ON][seed]) for seed in of_limit[OFF].keys() & of_limit[ON].keys()]
    if not pairs:
        return None
    periods = [on["period_s"] / off["period_s"] - 1 for off, on in pairs]
    spread = f" ± {statistics.stdev(periods):.1%}" if len(periods) > 1 else ""
    return (
        name,
        f"{statistics.mean(off['publish_lag_s'] / off['period_s'] for off, _ in pairs):.2f}",
        *(
            _change([(off[name], on[name]) for off, on in pairs], form)
            for name, form in (
                ("staleness", ".2f"),
                ("token_staleness", ".2f"),
                ("stale_groups", ".0f"),
                ("period_s", ".2f"),
            )
        ),
        f"{statistics.mean(periods):+.1%}{spread}".replace("-", "−"),
        f"{len(pairs)} of {steps} steps",
    )


def main() -> int:
    """Print and write both."""
    parser = argparse.ArgumentParser(prog="python -m bench.lab.fresh", description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="measured train steps of a simulation (default 400)")
    parser.add_argument("--processes", type=int, help="simulations at once (default: one a core)")
    parser.add_argument("--live", action="store_true", help="live loops instead (half an hour, quiet machine)")
    parser.add_argument(
        "--minutes", type=float, default=inf, help="begin no live run after so many; a later call goes on"
    )
    parser.add_argument(
        "--sglang", type=Path, metavar="PYTHON", help="live on two real engines instead, with SGLang of it"
    )
    parser.add_argument("--only", metavar="PRESET", default="", help="of those real ones only this")
    parser.add_argument("--anew", action="store_true", help="simulate what is known as well")
    options = parser.parse_args()
    written = json.loads(_RESULTS.read_text()) if _RESULTS.exists() else {}
    if options.live:
        written["live"] = _live(written.get("live", []), options.minutes)
    elif options.sglang:
        found = _real(options.sglang, options.only)
        named = {row["setting"]["name"] for row in found}
        written["real"] = [row for row in written.get("real", []) if row["setting"]["name"] not in named] + found
    else:
        known = written.get("simulated", []) if written.get("steps") == options.steps and not options.anew else []
        written |= {"steps": options.steps, "simulated": _simulated(options.steps, options.processes, known)}
    write_rows(_RESULTS, written)
    if lines := _live_lines(written.get("live", []) + written.get("real", [])):
        put("fresh_live", table(_LIVE_HEAD, lines))
    print(f"written to {_RESULTS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
