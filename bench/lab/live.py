"""`python -m bench.lab.live`: the live loop beside the simulator. Into results/staleness_live.json, and the docs.

Staleness, period and idle shares of the same settings, live (bench/live_loop) and simulated: whole batches and
streamed micro-batches, each with rollouts as the bottleneck and with training, under both of the worker's rules for
starting groups; and the same loop synchronous and asynchronous. A standard error is the spread of simulated runs of as
many steps: how far a live run that keeps the simulator's rules may be off by chance.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.live_loop.loop import Measured, run
from bench.live_loop.setting import Setting
from bench.tables import put, table
from buffer_service.simulator import simulate

_RESULTS = Path(__file__).parents[1] / "results" / "staleness_live.json"

TOLERANCE = 0.2
"""Versions."""
SEEDS = 16
"""Simulated runs of a setting."""

AGREEMENT = (
    Setting(name="whole batches, rollout-bound", preset="queue_drop(1)", rho=0.7),
    Setting(name="whole batches, train-bound", preset="queue_drop(1)", rho=1.4),
    Setting(name="streamed micro-batches, rollout-bound", preset="streaming(2)", rho=0.7),
    Setting(name="streamed micro-batches, train-bound", preset="streaming(2)", rho=1.4),
)
WHOLE_GROUPS = (
    Setting(name="whole groups in slots, rollout-bound", preset="queue_drop(1)", rho=0.7, whole_groups=True),
    Setting(name="whole groups in slots, train-bound", preset="queue_drop(1)", rho=1.4, whole_groups=True),
)
SYNC = (
    Setting(name="sync", preset="sync", rho=1.0),
    Setting(name="one_step_off", preset="one_step_off", rho=1.0),
    Setting(name="one_step_off max_staleness=2", preset="one_step_off", fields={"max_staleness": 2}, rho=1.0),
    Setting(name="queue_drop(1)", preset="queue_drop(1)", rho=1.0),
    Setting(name="streaming(2)", preset="streaming(2)", rho=1.0),
)
PACED = ("sync", "one_step_off")
"""Presets that admit groups up to the limit of their staleness, where a short lag of publishes does much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Means over the simulated runs of a setting; `standard_error` is one run's, of staleness."""

    pqs: float
    iqs: float
    staleness: float
    standard_error: float
    period_s: float
    period_standard_error_s: float
    trainer_idle_share: float
    slot_idle_share: float
    """Share of the wall time, reloads included, as the live figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A live run beside its simulation."""

    setting: Setting
    live: Measured
    simulated: Simulated
    with_lag: Simulated
    """Simulation whose engines learn of a publish as late as the live ones did, on average."""

    @property
    def difference(self) -> float:
        """Live minus simulated staleness, in versions."""
        return self.live.staleness - self.simulated.staleness

    @property
    def difference_with_lag(self) -> float:
        """Live minus simulated staleness, with the lag of the live run's publishes."""
        return self.live.staleness - self.with_lag.staleness

    @property
    def standard_errors(self) -> float:
        """The difference, over the standard error of a difference between one run and the mean of the simulated.

        0 where there is none: the synchronous loop is never stale, and no run differs from another.
        """
        if not self.difference:
            return 0.0
        spread = self.simulated.standard_error * (1.0 + 1.0 / SEEDS) ** 0.5
        return self.difference / spread if spread else math.inf

    @property
    def period_ratio(self) -> float:
        """Live over simulated."""
        return self.live.period_s / self.simulated.period_s

    def __str__(self) -> str:
        live, simulated = self.live, self.simulated
        sleeps = "; ".join(
            f"{name} slept {one.slept_s:.1f} s for {one.asked_s:.1f} asked, {one.mean_over_s * 1e3:.1f} ms over, "
            f"at most {one.longest_over_s * 1e3:.0f}"
            for name, one in (("trainer", live.trainer_sleeps), ("engine", live.engine_sleeps))
        )
        return (
            f"{self.setting.name}: staleness {live.staleness:.3f} = {live.pqs:.3f} + {live.iqs:.3f}, simulated "
            f"{simulated.staleness:.3f} = {simulated.pqs:.3f} + {simulated.iqs:.3f}: {self.difference:+.3f}, "
            f"(with the publish's lag {self.with_lag.staleness:.3f}, {self.with_lag.period_s:.3f} s), "
            f"{self.standard_errors:+.1f} standard errors of {simulated.standard_error:.3f}; period "
            f"{live.period_s:.3f} s, simulated {simulated.period_s:.3f}: {self.period_ratio - 1:+.1%}; idle: trainer "
            f"{live.trainer_idle_share:.0%}, simulated {simulated.trainer_idle_share:.0%}, slots "
            f"{live.slot_idle_share:.0%}, simulated {simulated.slot_idle_share:.0%}; publish to loaded "
            f"{live.publish_lag_s * 1e3:.0f} ms\n    {sleeps}{'; DISTURBED' if live.disturbed else ''}"
        )


def simulated(setting: Setting, *, steps: int, warmup: int, publish_lag_s: float = 0.0) -> Simulated:
    """The setting's simulation, by `SEEDS` runs of as many steps as the live one has."""
    results = [
        simulate(setting.simulation(steps=steps, warmup=warmup, seed=seed, publish_lag_s=publish_lag_s))
        for seed in range(1, SEEDS + 1)
    ]
    periods = [result.train_period_ratio * setting.ideal_period_s for result in results]

    def mean(name: str) -> float:
        return float(statistics.mean(getattr(result, name) for result in results))

    period_s = statistics.mean(periods)
    return Simulated(
        pqs=mean("pqs"),
        iqs=mean("iqs"),
        staleness=mean("staleness"),
        standard_error=statistics.stdev(result.staleness for result in results),
        period_s=period_s,
        period_standard_error_s=statistics.stdev(periods),
        trainer_idle_share=mean("trainer_idle_share"),
        slot_idle_share=1 - (1 - mean("slot_idle_share")) * (1 - setting.load_s / period_s),
    )


def compared(setting: Setting, directory: Path, *, steps: int, warmup: int) -> Comparison:
    """Run a setting live, and simulate it. Raises what `run` raises."""
    live = run(setting, directory, steps=steps, warmup=warmup)
    lag_s = max(0.0, live.publish_lag_s - setting.load_s)
    return Comparison(
        setting=setting,
        live=live,
        simulated=simulated(setting, steps=steps, warmup=warmup),
        with_lag=simulated(setting, steps=steps, warmup=warmup, publish_lag_s=lag_s),
    )


def _compared(setting: Setting, steps: int, warmup: int) -> Comparison:
    with tempfile.TemporaryDirectory(prefix="rollout-buffer-live-") as directory:
        found = compared(setting, Path(directory), steps=steps, warmup=warmup)
    print(found, flush=True)
    return found


def main() -> int:
    """Run every setting, print, write; 1 when staleness is further off than the tolerance."""
    parser = argparse.ArgumentParser(prog="python -m bench.lab.live", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120, help="measured train steps of a setting (default 120)")
    parser.add_argument("--warmup", type=int, default=15, help="train steps before them (default 15)")
    parser.add_argument("--only", metavar="WORD", default="", help="only settings with this in their name")
    parser.add_argument("--tries", type=int, default=1, help="runs of a setting until one is undisturbed (default 1)")
    parser.add_argument("--slower", type=float, default=1.0, help="stretch of time, for a busy machine (default 1)")
    options = parser.parse_args()
    chosen = [setting for setting in (*AGREEMENT, *WHOLE_GROUPS, *SYNC) if options.only in setting.name]
    if not chosen:
        parser.error(f"--only: no setting has {options.only!r} in its name")
    rows: dict[str, Row] = {}
    off = []
    for setting in chosen:
        setting = setting.slower(options.slower)  # noqa: PLW2901 - the same, in other units
        found = _compared(setting, options.steps, options.warmup)
        disturbed = 0
        while found.live.disturbed and disturbed + 1 < options.tries:
            disturbed += 1
            found = _compared(setting, options.steps, options.warmup)
        # Read anew: another command may have written other settings meanwhile.
        rows = json.loads(_RESULTS.read_text()) if _RESULTS.exists() else {}
        rows[setting.name] = {
            **_values(found),
            "disturbed_runs_before": disturbed,
            "load_average": os.getloadavg()[0],
        }
        _RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
        # What a lag does to admission at its limit is the lag's, not a disagreement.
        if abs(found.difference_with_lag if setting.preset in PACED else found.difference) > TOLERANCE:
            off.append(setting.name)
    put("staleness_live", staleness_table(rows))
    put("sync_live", sync_table(rows))
    print(f"\nwritten to {_RESULTS}")
    if off:
        print(f"further off than {TOLERANCE} versions: {', '.join(off)}")
    return bool(off)


Row = dict[str, Any]
"""A Comparison as JSON values."""


def staleness_table(rows: Mapping[str, Row]) -> list[str]:
    """Staleness by its parts, live / simulated / simulated with the lag, of the settings that have been run."""
    head = (
        *("setting", "pre-queue", "in queue", "staleness", "difference", "standard errors"),
        *("publish lag, periods", "period, s", "undisturbed"),
    )
    lines = [
        (
            f"{setting.name}, ρ {setting.rho:g}",
            *(_both(rows[setting.name], name, ".2f") for name in ("pqs", "iqs", "staleness")),
            _signed(rows[setting.name]["difference"], ".2f"),
            _signed(rows[setting.name]["standard_errors"], ".1f"),
            f"{rows[setting.name]['live']['publish_lag_s'] / rows[setting.name]['live']['period_s']:.2f}",
            _both(rows[setting.name], "period_s", ".3f"),
            "no" if rows[setting.name]["live"]["disturbed"] else "yes",
        )
        for setting in (*AGREEMENT, *WHOLE_GROUPS)
        if setting.name in rows
    ]
    return table(head, lines)


def sync_table(rows: Mapping[str, Row]) -> list[str]:
    """Period, idle shares and staleness, live / simulated / simulated with the lag; speeds over the first one's."""
    head = ("the same loop", "period, s", "times as fast", "trainer idle", "slots idle", "staleness", "undisturbed")
    found = [(setting.name, rows[setting.name]) for setting in SYNC if setting.name in rows]
    lines = [
        (
            name,
            _both(row, "period_s", ".3f"),
            " / ".join(f"{found[0][1][side]['period_s'] / row[side]['period_s']:.2f}" for side in _SIDES),
            *(_both(row, share, ".0%") for share in ("trainer_idle_share", "slot_idle_share")),
            _both(row, "staleness", ".2f"),
            "no" if row["live"]["disturbed"] else "yes",
        )
        for name, row in found
    ]
    return table(head, lines)


_SIDES = ("live", "simulated", "with_lag")


def _both(row: Row, name: str, form: str) -> str:
    return " / ".join(format(row[side][name], form) for side in _SIDES)


def _signed(value: float, form: str) -> str:
    return f"{value:+{form}}".replace("-", "−")


def _values(one: Comparison) -> Row:
    return {
        "setting": asdict(one.setting),
        "live": {**asdict(one.live), "disturbed": one.live.disturbed},
        "simulated": asdict(one.simulated),
        "with_lag": asdict(one.with_lag),
        "difference": one.difference,
        "standard_errors": one.standard_errors,
        "period_ratio": one.period_ratio,
    }


if __name__ == "__main__":
    sys.exit(main())
