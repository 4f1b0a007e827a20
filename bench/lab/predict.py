"""`python -m bench.lab.predict`: what the status of live runs predicts beside what it measures. Into the docs too.

Random settings (bench/live_loop): all presets and a few fields more, ρ 0.5 to 2. Loads take 0 to three quarters of a
period, and queues hold half a batch to three. Each is a row of results/staleness_predict.json. What has one that
nothing disturbed is not run again.
"""

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.live_loop.loop import run
from bench.live_loop.setting import Setting
from bench.tables import put, table, write_rows
from buffer_service.domain.policy import UNSET, OverflowAction
from buffer_service.observability.estimate.closed_forms import is_rough
from rollout_lab.queue_policies import queue_policy
from rollout_workers.tasks.dispatcher import OUTSTANDING
from trainer_client import BufferClient

_RESULTS = Path(__file__).parents[1] / "results" / "staleness_predict.json"

TOLERANCE = 0.2
"""Versions."""
SHARE = 0.95
"""Share of the settings that are to be within it."""
SETTINGS = 40
SEED = 20
PERIOD_S = 0.9
"""Ideal period of every setting, by which its engine's speed is chosen."""
WARMUP, STEPS = 6, 32
"""Steps; the status looks back over as many as the latter."""
MOST_WARMUP = 240
_SIMULATED_S = 20.0

KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("queue_drop(1)", {}),
    ("queue_drop({q})", {}),
    ("queue_drop(1)", {"max_queued_groups": "q"}),
    ("streaming({n})", {}),
    ("streaming({n})", {"max_queued_groups": "q"}),
    ("queue_max({eta})", {}),
    ("queue_drop(1)", {"max_queued_groups": "q", "overflow_action": "block"}),
    ("streaming({n})", {"max_queued_groups": "q", "overflow_action": "block"}),
    ("queue_drop(1)", {"max_queued_groups": "q", "overflow_action": "reject"}),
    ("sync", {}),
    ("one_step_off", {}),
    ("areal({eta})", {}),
    ("areal({eta})", {"max_inflight_groups": 0}),
    ("areal({eta})", {"max_inflight_groups": 0, "stale_action": "wait"}),
    ("areal({eta})", {"max_inflight_groups": 0, "fresh_start_ms": 0}),
    ("prime_rl", {}),
    ("prime_rl(2,4)", {}),
    ("miles", {}),
    ("miles_docs({eta})", {}),
    ("queue_drop({q})", {"order": "lifo"}),
)
"""Presets, and fields on top; q, n and eta are drawn."""


def settings() -> Iterator[Setting]:
    """The settings, each kind in turn."""
    draw = random.Random(SEED)
    for number in range(SETTINGS):
        preset, fields = KINDS[number % len(KINDS)]
        groups = draw.choice((8, 16))
        eta, micro, whole = draw.choice((1, 2, 4)), draw.choice((1, 2, 4)), draw.choice((1, 2, 3))
        room = round(groups * draw.choice((0.5, 1, 1.5, 2, 3) if "streaming" in preset else (1, 1.5, 2, 3)))
        room = max(room, micro)
        rho = round(math.exp(draw.uniform(math.log(0.5), math.log(2.0))), 2)
        sigma, ratio = draw.choice((0.3, 0.5, 0.8)), draw.choice((0.5, 1, 2))
        load = 0.0 if draw.random() < 0.25 else math.exp(draw.uniform(math.log(0.01), math.log(0.75)))
        setting = Setting(
            name="",
            preset=preset.format(q=whole, n=micro, eta=eta),
            fields={name: room if value == "q" else value for name, value in fields.items()},
            rho=rho,
            groups_per_batch=groups,
            group_size=4,
            concurrency=round(4 * groups * ratio),
            length_sigma=sigma,
            tokens_per_s=100.0,
            load_s=round(load * PERIOD_S, 3),
        )
        fast = setting.slower(PERIOD_S / setting.ideal_period_s)
        said = " ".join((setting.preset, *(f"{name}={value}" for name, value in setting.fields.items())))
        yield Setting(**{**asdict(fast), "load_s": setting.load_s, "name": f"{number + 1}. {said}"})


def warmup(setting: Setting) -> int:
    """Steps before those that count: as many as a queue takes to fill or drain, or the line of what may wait."""
    policy = queue_policy(setting.preset, setting.groups_per_batch, **setting.fields)
    groups = policy.max_queued_groups
    surplus = setting.train_s / (setting.rollout_s + setting.load_s) - 1
    if policy.max_lookahead != UNSET or policy.max_inflight_groups or policy.max_staleness != UNSET:
        return WARMUP
    if policy.overflow_action is not OverflowAction.DROP_OLDEST and surplus > 0:
        groups += OUTSTANDING * setting.groups_per_engine
    return WARMUP + min(MOST_WARMUP, round(groups / setting.groups_per_batch / max(abs(surplus), 0.01)))


def observed(setting: Setting, directory: Path) -> dict[str, Any]:
    """A row: the setting, and the estimate of its status at the end of a live run."""
    found = []

    def look(client: BufferClient) -> None:
        deadline = time.monotonic() + _SIMULATED_S
        while True:
            estimate = client.run("live").estimate
            if estimate is None:
                raise RuntimeError("the service gives no estimate")
            if not estimate.predicted.pending or time.monotonic() > deadline:
                found.append(estimate)
                return
            time.sleep(0.1)

    live = run(setting, directory, steps=STEPS, warmup=warmup(setting), at_end=look)
    (estimate,) = found
    predicted, measured = estimate.predicted, estimate.measured
    return {
        "setting": asdict(setting),
        "predicted": asdict(predicted),
        "measured": {name: getattr(measured, name) for name in ("pre_queue", "in_queue", "staleness", "groups")},
        "quantities": asdict(estimate.quantities),
        "verdict": list(estimate.verdict.sentences),
        "publish_lag_s": live.publish_lag_s,
        "period_s": live.period_s,
        "disturbed": live.disturbed,
    }


def _observed(setting: Setting) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rollout-buffer-live-") as directory:
        return observed(setting, Path(directory))


def _is_done(row: dict[str, Any] | None, setting: Setting) -> bool:
    return row is not None and row["setting"] == asdict(setting) and not row["disturbed"]


def difference(row: dict[str, Any]) -> float:
    """Measured minus predicted staleness, in versions; infinite where either is missing."""
    predicted, measured = (row[side]["staleness"] for side in ("predicted", "measured"))
    return math.inf if predicted is None or measured is None else measured - predicted


def rows_table(rows: list[dict[str, Any]]) -> list[str]:
    """Rows of the docs: settings, what was predicted and what was measured."""
    head = ("setting", "N", "C/B", "ρ", "σ", "load, periods", "predicted", "measured", "difference", "undisturbed")
    lines = []
    for row in rows:
        setting, predicted, measured = Setting(**row["setting"]), row["predicted"], row["measured"]
        number, _, said = setting.name.partition(" ")
        off = f"{difference(row):+.2f}".replace("-", "−")
        lines.append(
            (
                f"{number} `{said}`",
                setting.groups_per_batch,
                f"{setting.concurrency / setting.groups_per_batch / setting.group_size:g}",
                f"{setting.rho:g}",
                f"{setting.length_sigma:g}",
                f"{setting.load_s / setting.ideal_period_s:.2f}",
                *(
                    f"{one['pre_queue']:.2f} + {one['in_queue']:.2f} = {one['staleness']:.2f}"
                    for one in (predicted, measured)
                ),
                off if abs(difference(row)) <= TOLERANCE else f"**{off}**",
                "no" if row["disturbed"] else "yes",
            )
        )
    return table(head, lines)


def summary_table(rows: list[dict[str, Any]]) -> list[str]:
    """Numbers of settings that are near, of all and of those in which something holds a side back."""
    kinds = {
        "all": rows,
        "of these, nothing disturbed": [row for row in rows if not row["disturbed"]],
        "near balance, 0.8 < ρ < 1.2": [row for row in rows if is_rough(row["quantities"]["rho"])],
        "loads of a tenth of a period and more": [row for row in rows if row["setting"]["load_s"] >= PERIOD_S / 10],
        "admission or a gate": [row for row in rows if _is_held(Setting(**row["setting"]))],
    }
    head = ("settings", "run", f"within {TOLERANCE}", "within 0.1", "mean difference", "largest")
    lines = []
    for kind, some in kinds.items():
        off = [abs(difference(row)) for row in some]
        near = (sum(one <= limit for one in off) for limit in (TOLERANCE, 0.1))
        if off:
            lines.append((kind, len(off), *near, f"{sum(off) / len(off):.2f}", f"{max(off):.2f}"))
    return table(head, lines)


def _is_held(setting: Setting) -> bool:
    policy = queue_policy(setting.preset, setting.groups_per_batch, **setting.fields)
    return policy.max_lookahead != UNSET or policy.max_staleness != UNSET


def main() -> int:
    """Run what has no row yet, print, write; 1 when too few of the settings are within the tolerance."""
    parser = argparse.ArgumentParser(prog="python -m bench.lab.predict", description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=SETTINGS, help="settings to run now (default all)")
    parser.add_argument("--at-once", type=int, default=1, help="settings at the same time, as sleeps allow (default 1)")
    parser.add_argument("--anew", action="store_true", help="forget the rows that are there")
    options = parser.parse_args()
    written = {} if options.anew or not _RESULTS.exists() else json.loads(_RESULTS.read_text())
    rows = {row["setting"]["name"]: row for row in written.get("rows", ())}
    asked = list(settings())
    left = [one for one in asked if not _is_done(rows.get(one.name), one)]
    # What takes longest goes first, so that none is left alone at the end.
    left = sorted(left, key=lambda one: (-warmup(one), one.preset != "sync"))[: options.most]
    with ThreadPoolExecutor(options.at_once) as pool:
        for found in as_completed([pool.submit(_observed, setting) for setting in left]):
            row = found.result()
            name = row["setting"]["name"]
            rows[name] = row
            print(f"{name}: {difference(row):+.2f}", "DISTURBED" if row["disturbed"] else "", flush=True)
            write_rows(_RESULTS, {"rows": [rows[one.name] for one in asked if one.name in rows]})
    done = [rows[one.name] for one in asked if one.name in rows]
    put("staleness_predict", rows_table(done))
    within = sum(abs(difference(row)) <= TOLERANCE for row in done)
    put("predict_summary", summary_table(done))
    print(f"{within} of {len(done)} settings are within {TOLERANCE} versions; written to {_RESULTS}")
    return bool(within < SHARE * len(done))


if __name__ == "__main__":
    sys.exit(main())
