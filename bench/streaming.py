"""`make bench-streaming`: staleness of whole batches and of streamed ones, on a live service.

Everything is real but the engine: service, store, worker and trainer client as users run them; the engine keeps the
timing of 256 slots without a model, the training step is a sleep of tokens / T. For each utilization ρ = R / T three
runs of the same length: whole batches over a queue of one batch; micro-batches of 4 groups over a queue of 8; single
groups over such a queue, newest first. Staleness is what the service's own statistics say after the warm-up; the
closed form is that of docs/staleness.md.
"""

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.ours import service
from bench.tables import put, table, write_rows
from bench.worker import worker
from trainer_client import BufferClient, TrainerSession
from trainer_client.policy import Policy
from trainer_client.state import RunState
from trainer_client.tasks import SamplingParams, Task

N, G, SLOTS = 32, 8, 256
MEDIAN, SIGMA, CAP = 100, 0.5, 1_000
MEAN = MEDIAN * 2.718281828 ** (SIGMA**2 / 2)
"""Sigma of a lognormal; the cap of ten medians is beyond 4.6 sigma."""
PROMPT = 8
POLICIES = {
    "whole": Policy(batch_groups=N, max_queued_groups=N),
    "streamed": Policy(batch_groups=N, micro_batch_groups=4, max_queued_groups=8),
    "single": Policy(batch_groups=N, micro_batch_groups=1, max_queued_groups=8, order="lifo"),
}
RHOS = (0.67, 0.85, 1.07, 1.5)
_RESULTS = Path(__file__).parent / "results" / "streaming.json"


@dataclass(frozen=True, slots=True)
class Reading:
    """Counts of one run after its warm-up."""

    steps: int
    wall_s: float
    staleness: float
    in_queue: float
    trained_length: float
    sampled_length: float
    dropped: int


def tasks() -> Iterator[Task]:
    """Prompts without end."""
    sampling = SamplingParams(max_new_tokens=CAP)
    for number in itertools.count():
        yield Task(group_size=G, sampling=sampling, prompt_token_ids=[1 + number % 1_000] * PROMPT)


def train(session: TrainerSession, tokens_per_s: float, steps: int) -> None:
    """Take `steps` steps: a micro-batch takes its tokens' share of the time, the last one publishes."""
    for micro in session.micro_batches():
        tokens = sum(len(group.columns["token_ids"]) - PROMPT * G for group in micro.groups)
        time.sleep(tokens / tokens_per_s)
        if micro.final:
            session.publish()
            steps -= 1
            if steps == 0:
                return


def measure(scratch: Path, policy: Policy, rho: float, steps: int, tokens_per_s: float) -> Reading:
    """One run: warm up for a third of the steps, then count."""
    rollout_tps = SLOTS * tokens_per_s
    with (
        service(scratch, "process") as served,
        BufferClient(served.address) as client,
        # Groups enough in flight that no slot waits for one, stragglers and all.
        worker(
            *(served.address, "live", scratch / "worker.log"),
            *("--simulate", "--slots", str(SLOTS), "--tokens-per-s", str(tokens_per_s), "--groups-per-engine", "96"),
            *("--length-median", str(MEDIAN), "--length-sigma", str(SIGMA), "--pause-mode", "in_place"),
        ),
        client.session("live", policy=policy, tasks=tasks()) as session,
    ):
        train(session, rollout_tps / rho, max(4, steps // 3))
        before, began = session.state(), time.perf_counter()
        train(session, rollout_tps / rho, steps)
        wall_s, after = time.perf_counter() - began, session.state()
    return reading(before, after, steps, wall_s)


def reading(before: RunState, after: RunState, steps: int, wall_s: float) -> Reading:
    """The difference of two states."""

    def counted(name: str) -> int:
        return after.statistics[name] - before.statistics[name]

    def length(state: str) -> float:
        early, late = getattr(before.ledger.groups, state), getattr(after.ledger.groups, state)
        return float((late.tokens - early.tokens) / (late.samples - early.samples)) - PROMPT

    groups = counted("assembled_groups")
    return Reading(
        steps=steps,
        wall_s=wall_s,
        staleness=counted("staleness_sum") / groups,
        in_queue=counted("in_queue_staleness_sum") / groups,
        trained_length=length("trained"),
        sampled_length=length("accepted"),
        dropped=after.ledger.groups.dropped_overflow.groups - before.ledger.groups.dropped_overflow.groups,
    )


def predicted_in_queue(rho: float) -> float:
    """Mean in-queue staleness of whole batches, in versions: ρ up to 1, then 1/2 + (q - 1/2)/ρ, here with q = 1."""
    return rho if rho <= 1 else 0.5 + 0.5 / rho


def main() -> None:
    """Measure, print, write the results and the table in docs; with --rho, others stay as they were."""
    parser = argparse.ArgumentParser(prog="python -m bench.streaming", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30, help="counted steps of each run (default 30)")
    parser.add_argument("--tokens-per-s", type=float, default=100.0, help="decoding speed of a slot (default 100)")
    parser.add_argument("--rho", type=float, action="append", help=f"only these utilizations (default {RHOS})")
    options = parser.parse_args()
    known = json.loads(_RESULTS.read_text())["rows"] if _RESULTS.exists() else []
    rows: list[dict[str, Any]] = [row for row in known if row["rho"] not in (options.rho or RHOS)]
    ideal_s = N * G * MEAN / (SLOTS * options.tokens_per_s)
    print(
        f"{'ρ':>5} {'':9}{'in queue':>9}{'closed':>8}{'total':>7}"
        f"{'period/ideal':>13}{'trained/sampled':>16}{'dropped':>8}"
    )
    for rho in options.rho or RHOS:
        for name, policy in POLICIES.items():
            with tempfile.TemporaryDirectory(prefix="rollout-buffer-streaming-") as scratch:
                told = measure(Path(scratch), policy, rho, options.steps, options.tokens_per_s)
            row = {
                "rho": rho,
                "batches": name,
                "in_queue_staleness": round(told.in_queue, 3),
                "staleness": round(told.staleness, 3),
                "period_over_ideal": round(told.wall_s / told.steps / (ideal_s * max(1.0, rho)), 3),
                "trained_over_sampled_length": round(told.trained_length / told.sampled_length, 3),
                "dropped_groups": told.dropped,
            }
            rows.append(row)
            closed = f"{predicted_in_queue(rho):.2f}" if name == "whole" else ""
            print(
                f"{rho:>5} {name:9}{row['in_queue_staleness']:>9}{closed:>8}{row['staleness']:>7}"
                f"{row['period_over_ideal']:>13}{row['trained_over_sampled_length']:>16}{told.dropped:>8}",
                flush=True,
            )
    rows.sort(key=lambda row: row["rho"])
    said = {"steps": options.steps, "tokens_per_s": options.tokens_per_s, "cores": os.cpu_count()}
    write_rows(_RESULTS, said | {"rows": rows})
    put("bench-streaming", lines(rows))
    print(f"\nwritten to {_RESULTS}")


def lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table: a line for each ρ, a cell for each policy."""
    shown = {
        "in queue": "in_queue_staleness",
        "staleness": "staleness",
        "period over ideal": "period_over_ideal",
        "trained over sampled length": "trained_over_sampled_length",
    }
    cells = {(row["rho"], row["batches"]): row for row in rows}

    def cell(rho: float, name: str, field: str) -> str:
        return f"{cells[rho, name][field]:.2f}" if (rho, name) in cells else ""

    return table(
        ("ρ", *(f"{what}: {name}" for what in shown for name in POLICIES)),
        [
            (rho, *(cell(rho, name, field) for field in shown.values() for name in POLICIES))
            for rho in sorted({row["rho"] for row in rows})
        ],
    )


if __name__ == "__main__":
    main()
