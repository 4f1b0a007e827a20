"""`make bench-reward`: what staleness costs in reward, on the demo's task. Into results/reward.json, and the docs.

Every part is real: SGLang on the CPU, the service with its store, a worker, and a trainer on torch. A cell is one
policy with one loss and one seed. What has a result is not run again, so the command can be ended and started at any
time.
"""

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

from bench.reward import cells, loop
from bench.reward.learner import LEARNING_RATE, OPTIMIZER_STEPS
from bench.reward.page import write
from bench.reward.turns import Turns
from examples.demo.processes import service
from rollout_workers.engine.sglang.launch import SglangLauncher
from rollout_workers.engine.sglang.server import SglangServerOptions

RESULTS = Path(__file__).parents[1] / "results" / "reward.json"
STEPS, TRAIN_S = 40, 0.4
_RUNNING_REQUESTS = 128
_TURN_S = 345.0


def _run(
    left: Sequence[cells.Cell],
    start: loop.Start,
    results: cells.Results,
    place: loop.Place,
    at: Path,
    turns: Turns,
) -> list[cells.Cell]:
    """Run the cells; those that failed."""
    took: list[float] = []
    failed: list[cells.Cell] = []
    for number, cell in enumerate(left, 1):
        if cell.seed != start.seed:
            start = loop.Start(cell.seed)
        turns.next(max(took, default=0.0))
        began = time.monotonic()
        try:
            row = loop.run(cell, start, place, at / f"cell-{number}")
        except Exception as error:
            # One that stands still is run by the next command. Two in a row: the engine or the service is gone.
            if failed and failed[-1] == left[number - 2]:
                raise
            failed.append(cell)
            print(f"{number}/{len(left)}  {cell}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            continue
        took.append(time.monotonic() - began)
        results.add({**row, "at": datetime.now(UTC).isoformat(timespec="minutes")})
        rewards, remaining_s = row["reward"], fmean(took) * (len(left) - number)
        print(
            f"{number}/{len(left)}  {cell}: reward {rewards[0]:.3f} → {rewards[-1]:.3f} in {row['wall_s']} s, "
            f"staleness {fmean(row['staleness']):.2f}; {remaining_s / 60:.0f} minutes left",
            flush=True,
        )
    return failed


def _live(
    left: Sequence[cells.Cell], results: cells.Results, at: Path, options: argparse.Namespace
) -> list[cells.Cell]:
    start = loop.Start(left[0].seed)
    start.save(at / "model")
    with (
        Turns(options.lock, _TURN_S) as turns,
        service(at / "service") as (child, address, _),
        _engine(at, options.sglang_python) as engine,
    ):
        assert engine.pid is not None  # noqa: S101 -- it has been started
        place = loop.Place(address, child.process.pid, engine.base_url, engine.pid, options.steps, options.train_s)
        return _run(left, start, results, place, at, turns)


@contextmanager
def _engine(at: Path, python: Path) -> Iterator[SglangLauncher]:
    """The server of all cells."""
    launcher = SglangLauncher(
        SglangServerOptions(
            python=python,
            model_path=at / "model",
            log_path=at / "sglang.log",
            dtype="float32",
            max_running_requests=_RUNNING_REQUESTS,
        )
    )
    with asyncio.Runner() as runner:
        runner.run(launcher.start())
        try:
            yield launcher
        finally:
            runner.run(launcher.stop())


def main() -> int:
    """Run what is left, and write the figure and the table of what is there."""
    parser = argparse.ArgumentParser(prog="python -m bench.reward", description=__doc__.splitlines()[0])
    parser.add_argument("--sglang-python", type=Path, default=Path(".venv-sglang/bin/python"))
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of results (default: the project's)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of a cell (default {STEPS})")
    parser.add_argument("--train-s", type=float, default=TRAIN_S, help=f"time of a step's training (default {TRAIN_S})")
    parser.add_argument("--policy", nargs="*", choices=list(cells.POLICIES), default=list(cells.POLICIES))
    parser.add_argument("--loss", nargs="*", choices=cells.LOSSES, default=list(cells.LOSSES))
    parser.add_argument("--seed", nargs="*", type=int, default=list(cells.SEEDS))
    parser.add_argument("--most", type=int, help="cells to run now (default: all that are left; 0: only write)")
    parser.add_argument(
        "--lock", type=Path, help="file that is locked (flock) for some cells at a time, where others measure too"
    )
    options = parser.parse_args()
    # So that every process ends with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    setting = {
        "steps": options.steps,
        "train_s": options.train_s,
        "groups": cells.GROUPS,
        "group_size": cells.GROUP_SIZE,
        "micro_batch_groups": cells.MICRO_BATCH_GROUPS,
        "learning_rate": LEARNING_RATE,
        "optimizer_steps": OPTIMIZER_STEPS,
    }
    results = cells.Results(options.results, setting)
    left = results.left(cells.cells(options.policy, options.loss, options.seed))[: options.most]
    print(f"{len(results.rows())} results are there, {len(left)} cells to run", flush=True)
    failed: list[cells.Cell] = []
    if left:
        with tempfile.TemporaryDirectory(prefix="rollout-buffer-reward-") as at:
            failed = _live(left, results, Path(at), options)
    if options.results == RESULTS:
        print(f"written: {', '.join(map(str, write(results)))}")
    if failed:
        print(f"failed, and run by the next command: {'; '.join(map(str, failed))}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
