"""`python -m bench.staleness_live`: the live loop beside the simulator. Into results/staleness_live.json, and the docs.

Staleness, period and idle shares of the same settings, live (bench/live_loop) and simulated: whole batches and
streamed rounds, each with rollouts as the bottleneck and with training, under both of the worker's rules for starting
groups; and the same loop synchronous and asynchronous. A standard error is the spread of simulated runs of as many
steps: how far a live run that keeps the simulator's rules may be off by chance.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.live_loop.loop import Measured, run
from bench.live_loop.setting import Setting
from bench.tables import put, table
from buffer_service.staleness.simulator import simulate

_RESULTS = Path(__file__).parent / "results" / "staleness_live.json"

TOLERANCE = 0.2
"""Versions."""
SEEDS = 16
"""Simulated runs of a setting."""

AGREEMENT = (
    Setting(name="whole batches, rollout-bound", preset="queue_drop(1)", rho=0.7),
    Setting(name="whole batches, train-bound", preset="queue_drop(1)", rho=1.4),
    Setting(name="streamed rounds, rollout-bound", preset="streaming(2)", rho=0.7),
    Setting(name="streamed rounds, train-bound", preset="streaming(2)", rho=1.4),
)
WHOLE_GROUPS = (
    Setting(name="whole groups in slots, rollout-bound", preset="queue_drop(1)", rho=0.7, whole_groups=True),
    Setting(name="whole groups in slots, train-bound", preset="queue_drop(1)", rho=1.4, whole_groups=True),
)
SYNC = (
    Setting(name="synchronous", preset="sync", rho=1.0),
    Setting(name="one step off", preset="one_step_off", rho=1.0),
    Setting(name="asynchronous, whole batches", preset="queue_drop(1)", rho=1.0),
    Setting(name="asynchronous, streamed rounds", preset="streaming(2)", rho=1.0),
)


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
    """Of the wall time, reloads included, as the live figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A live run beside its simulation."""

    setting: Setting
    live: Measured
    simulated: Simulated

    @property
    def difference(self) -> float:
        """Live minus simulated staleness, in versions."""
        return self.live.staleness - self.simulated.staleness

    @property
    def standard_errors(self) -> float:
        """The difference, over the standard error of a difference between one run and the mean of the simulated."""
        return self.difference / (self.simulated.standard_error * (1 + 1 / SEEDS) ** 0.5)

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
            f"{self.standard_errors:+.1f} standard errors of {simulated.standard_error:.3f}; period "
            f"{live.period_s:.3f} s, simulated {simulated.period_s:.3f}: {self.period_ratio - 1:+.1%}; idle: trainer "
            f"{live.trainer_idle_share:.0%}, simulated {simulated.trainer_idle_share:.0%}, slots "
            f"{live.slot_idle_share:.0%}, simulated {simulated.slot_idle_share:.0%}; publish to loaded "
            f"{live.publish_lag_s * 1e3:.0f} ms\n    {sleeps}{'; DISTURBED' if live.disturbed else ''}"
        )


def simulated(setting: Setting, *, steps: int, warmup: int) -> Simulated:
    """The setting's simulation, by `SEEDS` runs of as many steps as the live one has."""
    results = [simulate(setting.simulation(steps=steps, warmup=warmup, seed=seed)) for seed in range(1, SEEDS + 1)]
    periods = [result.train_period_ratio * setting.ideal_period_s for result in results]

    def mean(name: str) -> float:
        return statistics.mean(getattr(result, name) for result in results)

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


def compared(setting: Setting, *, steps: int, warmup: int) -> Comparison:
    """Run a setting live, and simulate it. Raises what `run` raises."""
    with tempfile.TemporaryDirectory(prefix="rollout-buffer-live-") as directory:
        live = run(setting, Path(directory), steps=steps, warmup=warmup)
    return Comparison(setting=setting, live=live, simulated=simulated(setting, steps=steps, warmup=warmup))


def main() -> int:
    """Run every setting, print, write; 1 when staleness is further off than the tolerance."""
    parser = argparse.ArgumentParser(prog="python -m bench.staleness_live", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120, help="measured train steps of a setting (default 120)")
    parser.add_argument("--warmup", type=int, default=15, help="train steps before them (default 15)")
    parser.add_argument("--only", metavar="WORD", default="", help="only settings with this in their name; no results")
    options = parser.parse_args()
    parts: dict[str, list[Comparison]] = {}
    for part, settings in (("agreement", AGREEMENT), ("whole_groups", WHOLE_GROUPS), ("sync", SYNC)):
        parts[part] = []
        for setting in settings:
            if options.only in setting.name:
                found = compared(setting, steps=options.steps, warmup=options.warmup)
                print(found, flush=True)
                parts[part].append(found)
    if not options.only:
        report = {
            "steps": options.steps,
            "warmup": options.warmup,
            "cores": os.cpu_count(),
            "load_average_at_the_end": os.getloadavg()[0],
            **{part: [_values(one) for one in found] for part, found in parts.items()},
        }
        _RESULTS.write_text(json.dumps(report, indent=1) + "\n")
        put("staleness_live", staleness_table([*parts["agreement"], *parts["whole_groups"]]))
        put("sync_live", sync_table(parts["sync"]))
        print(f"\nwritten to {_RESULTS}")
    off = [one.setting.name for found in parts.values() for one in found if abs(one.difference) > TOLERANCE]
    if off:
        print(f"further off than {TOLERANCE} versions: {', '.join(off)}")
    return bool(off)


def staleness_table(found: Sequence[Comparison]) -> list[str]:
    """Staleness by its parts, live and simulated."""
    head = (
        *("setting", "ρ", "pre-queue: live", "simulated", "in queue: live", "simulated"),
        *("staleness: live", "simulated", "difference", "standard errors", "period s: live", "simulated"),
    )
    rows = [
        (
            *(one.setting.name, f"{one.setting.rho:g}"),
            *(f"{one.live.pqs:.2f}", f"{one.simulated.pqs:.2f}", f"{one.live.iqs:.2f}", f"{one.simulated.iqs:.2f}"),
            *(f"{one.live.staleness:.2f}", f"{one.simulated.staleness:.2f}"),
            *(_signed(one.difference, 2), _signed(one.standard_errors, 1)),
            *(f"{one.live.period_s:.3f}", f"{one.simulated.period_s:.3f}"),
        )
        for one in found
    ]
    return table(head, rows)


def sync_table(found: Sequence[Comparison]) -> list[str]:
    """Period, idle shares and staleness, live and simulated; speeds over the first one's."""
    head = (
        *("the same loop", "period s: live", "simulated", "times as fast: live", "simulated"),
        *("trainer idle: live", "simulated", "slots idle: live", "simulated", "staleness: live", "simulated"),
    )
    first = found[0]
    rows = [
        (
            *(one.setting.name, f"{one.live.period_s:.3f}", f"{one.simulated.period_s:.3f}"),
            f"{first.live.period_s / one.live.period_s:.2f}",
            f"{first.simulated.period_s / one.simulated.period_s:.2f}",
            *(f"{one.live.trainer_idle_share:.0%}", f"{one.simulated.trainer_idle_share:.0%}"),
            *(f"{one.live.slot_idle_share:.0%}", f"{one.simulated.slot_idle_share:.0%}"),
            *(f"{one.live.staleness:.2f}", f"{one.simulated.staleness:.2f}"),
        )
        for one in found
    ]
    return table(head, rows)


def _signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def _values(one: Comparison) -> dict[str, Any]:
    return {
        "setting": asdict(one.setting),
        "live": {**asdict(one.live), "disturbed": one.live.disturbed},
        "simulated": asdict(one.simulated),
        "difference": one.difference,
        "standard_errors": one.standard_errors,
        "period_ratio": one.period_ratio,
    }


if __name__ == "__main__":
    sys.exit(main())
