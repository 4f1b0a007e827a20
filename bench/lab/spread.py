"""`python -m bench.lab.spread`: groups spread over a worker's engines. Into results/spread.json, and the docs.

The worker's own parts (SingleTurn, Spread) run over simulated engines whose samples slow each other down. The event
loop's time jumps to what comes next. A batch of groups begins at once, as in a synchronous run. The time until the last
group is complete is measured with and without; the samples are the same.
"""

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from bench.tables import put, table, write_rows
from buffer_cli.staleness.output import progress
from rollout_buffer.v1 import tasks_pb2
from rollout_lab.processes import in_processes
from rollout_workers.counters import Counters
from rollout_workers.engine.simulated.answers import AnswerOptions
from rollout_workers.engine.simulated.engine import SimulatedEngine, SimulatedEngineOptions
from rollout_workers.generation.attempts import Attempts
from rollout_workers.generation.samples import GroupProgress
from rollout_workers.generation.spread import Spread
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.tasks.rollout import SingleTurn

_RESULTS = Path(__file__).parents[1] / "results" / "spread.json"

ENGINES, SLOTS, GROUP_SIZE = 4, 32, 8
GROUPS = (5, 16)
"""Groups of a batch: five are not to be divided evenly."""
MEAN, CAP, TOKENS_PER_S = 1_400.0, 13_200, 50.0
CROWDINGS = (0.0, 0.05, 0.25)
SIGMAS = (0.5, 1.0)
SEEDS = 4
BATCHES = 3
"""Batches that are measured, after one that teaches lengths and paces."""
PROMPT = 8

Setting = tuple[int, float, float, int, bool]
"""Groups of a batch, crowding, σ, seed, and whether groups are spread."""


class _Jumping(asyncio.SelectorEventLoop):
    """An event loop in which nothing is waited for: when all is at rest, its time is that of the next timer."""

    jumped = 0.0

    def time(self) -> float:
        return self.jumped

    def _run_once(self) -> None:
        timers, ready = self._scheduled, self._ready  # type: ignore[attr-defined]
        if timers and not ready:
            self.jumped = max(self.jumped, timers[0].when())
        super()._run_once()  # type: ignore[misc]


def measure(setting: Setting) -> dict[str, Any]:
    """Mean times of a batch and of a group in seconds, samples moved, and tokens, the same whether spread or not."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    loop, real = _Jumping(), time.monotonic
    time.monotonic = loop.time
    try:
        return loop.run_until_complete(_measure(*setting))
    finally:
        time.monotonic = real
        loop.close()


async def _measure(groups: int, crowding: float, sigma: float, seed: int, is_spread: bool) -> dict[str, Any]:  # noqa: FBT001 - a setting
    median = MEAN / float(np.exp(sigma**2 / 2))
    answers = AnswerOptions(length_median=median, length_sigma=sigma, seed=seed, prompt_tokens=PROMPT)
    options = SimulatedEngineOptions(
        tokens_per_s=TOKENS_PER_S, slots=SLOTS, crowding=crowding, answers=answers, prefill_tokens_per_s=5_000.0
    )
    slots = []
    for i in range(ENGINES):
        engine = SimulatedEngine(options)
        slot = EngineSlot(f"e{i}", engine, await engine.info(), base_model=None)
        slot.adopt(slot.loaded)
        slots.append(slot)
    counters = Counters()
    spread = Spread(slots, counters) if is_spread else None
    moving = asyncio.create_task(spread.run()) if spread is not None else None
    times, group_times, tokens = [], [], 0
    for batch in range(1 + BATCHES):
        began, turns = time.monotonic(), []
        for number in range(groups):
            ids = np.arange(PROMPT, dtype=np.int32) + 8 * (batch * groups + number) % 1_000
            asked = tasks_pb2.Task(task_id="t", group_size=GROUP_SIZE)
            asked.sampling.max_new_tokens = CAP
            group = GroupProgress(tasks_pb2.Lease(lease_id="t/0/1", task=asked), ids)
            slot = slots[number % ENGINES]
            turns.append(SingleTurn(group, slot, Attempts(1), timeout_s=1e6, spread=spread))
        ends = await asyncio.gather(*(_end_of(turn) for turn in turns))
        if batch:
            times.append(time.monotonic() - began)
            group_times += [end - began for end in ends]
            tokens += sum(turn.progress.tokens for turn in turns)
    if moving is not None:
        moving.cancel()
    mean_s = {"batch_s": statistics.mean(times), "group_s": statistics.mean(group_times)}
    return mean_s | {"moved": counters.samples_moved, "tokens": tokens}


def _ratio(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], name: str) -> tuple[float, float]:
    """Mean over seeds of what is with spreading over what is without, and its spread."""
    ratios = [after[name] / before[name] for before, after in pairs]
    return statistics.mean(ratios), statistics.stdev(ratios)


async def _end_of(turn: SingleTurn) -> float:
    """Time at which it is complete."""
    await turn.run()
    return time.monotonic()


def main() -> int:
    """Print and write every setting; 1 when a batch takes longer with spreading, or has other tokens."""
    parser = argparse.ArgumentParser(prog="python -m bench.lab.spread", description=__doc__)
    parser.add_argument("--processes", type=int, help="settings at once (default: one a core)")
    options = parser.parse_args()
    cells = list(itertools.product(GROUPS, CROWDINGS, SIGMAS))
    asked = [(*cell, seed, is_spread) for cell in cells for seed in range(SEEDS) for is_spread in (False, True)]
    with progress(len(asked), "runs") as done:
        found = dict(zip(asked, in_processes(measure, asked, processes=options.processes, done=done), strict=True))
    names = ("groups", "crowding", "sigma", "seed", "spread")
    rows = [dict(zip(names, setting, strict=True)) | values for setting, values in found.items()]
    lines, is_well = [], True
    for cell in cells:
        groups, crowding, sigma = cell
        pairs = [(found[*cell, seed, False], found[*cell, seed, True]) for seed in range(SEEDS)]
        is_well &= (
            all(before["tokens"] == after["tokens"] for before, after in pairs) and _ratio(pairs, "batch_s")[0] < 1.02
        )
        moved = statistics.mean(after["moved"] for _, after in pairs) / (1 + BATCHES) / (groups * GROUP_SIZE)
        seconds = statistics.mean(before["batch_s"] for before, _ in pairs)
        changes = [
            f"{mean:.2f} ± {spread:.2f}" for mean, spread in (_ratio(pairs, "batch_s"), _ratio(pairs, "group_s"))
        ]
        alone = 1 / (1 + crowding * (SLOTS - 1))
        lines.append((groups, f"{alone:.2f}", f"{sigma:g}", f"{seconds:.0f}", *changes, f"{moved:.1%}"))
    for line in lines:
        print(*line, sep="  ")
    head = (
        "groups",
        "speed of a sample in a full engine over alone",
        "σ",
        "batch without, s",
        "batch, with over without",
        "mean group, with over without",
        "samples moved",
    )
    put("spread", table(head, lines))
    write_rows(_RESULTS, {"rows": rows})
    print(f"written to {_RESULTS}")
    return int(not is_well)


if __name__ == "__main__":
    sys.exit(main())
