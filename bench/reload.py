"""`make bench-reload`: tokens per second with a weight update every 2 s against none, by pause mode and manifest kind.

Everything is real: SGLang on CPU, worker, service and trainer client as users run them. The run drops its oldest groups
instead of waiting for a trainer that pulls, so the engine is never short of work. Within one run windows without and
with updates alternate; the ratio of a window is its tokens per second over the mean of the windows without updates
before and after it. Tokens are those of groups that the service accepted.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.engine_rate import VOCABULARY, make_model
from bench.ours import service
from bench.tables import put, table
from bench.worker import worker
from rollout_workers.engine.sglang.launch import SglangLauncher
from rollout_workers.engine.sglang.server import SglangServerOptions
from trainer_client import BufferClient, TrainerSession
from trainer_client.policy import Policy
from trainer_client.publish import CollectivePublisher, FilesPublisher, TensorsPublisher
from trainer_client.tasks import SamplingParams, Task

if TYPE_CHECKING:
    from trainer_client.publish.publication import WeightSource

MODES = ("retract", "in_place", "abort")
KINDS = ("path", "http", "collective", "tensors")
GROUP, PROMPT_TOKENS, MOST_TOKENS = 2, 12, 256
EVERY_S = 2.0
WEIGHTS = "model.safetensors"
_RESULTS = Path(__file__).parent / "results" / "reload.json"


@dataclass(slots=True)
class Window:
    """Counts of what was accepted in some seconds."""

    tokens_per_s: float
    reload_ms: list[int] = field(default_factory=list)


def tasks() -> Iterator[Task]:
    """Prompts without end."""
    sampling = SamplingParams(max_new_tokens=MOST_TOKENS)
    for number in itertools.count():
        prompt = [3 + (number + at) % (VOCABULARY - 3) for at in range(PROMPT_TOKENS)]
        yield Task(group_size=GROUP, sampling=sampling, prompt_token_ids=prompt)


@contextmanager
def publisher_of(kind: str, folder: Path) -> Iterator[Any]:
    """Make the publisher by which weights travel."""
    files = FilesPublisher(folder / "published", serve="path" if kind == "path" else "http")
    if kind in ("path", "http"):
        with files as publisher:
            yield publisher
    elif kind == "tensors":
        with TensorsPublisher(files) as by_value:
            yield by_value
    else:
        files.close()
        with CollectivePublisher() as group:
            yield group


def window(session: TrainerSession, seconds: float, publish: Callable[[], None] | None) -> Window:
    """Let so many seconds pass, with updates or without."""
    before, began = session.state(), time.monotonic()
    seen = Window(0.0)
    due = began + EVERY_S / 2
    while (now := time.monotonic()) < began + seconds:
        if publish is not None and now >= due:
            publish()
            due += EVERY_S
        time.sleep(max(0.0, min(due, began + seconds) - time.monotonic()) if publish else seconds)
        if publish is not None:
            seen.reload_ms += [engine.last_reload_ms for engine in session.state().engines]
    after, spent = session.state(), time.monotonic() - began
    early, late = before.ledger.groups.accepted, after.ledger.groups.accepted
    responses = late.tokens - early.tokens - PROMPT_TOKENS * (late.samples - early.samples)
    seen.tokens_per_s = responses / spent
    return seen


def measure(
    address: str, url: str, models: tuple[Path, Path], mode: str, kind: str, options: argparse.Namespace, at: Path
) -> dict[str, Any]:
    """One mode and kind: a row of the table."""
    from safetensors.torch import load_file

    folder = at / f"{mode}-{kind}"
    folder.mkdir()
    policy = Policy(batch_groups=8, max_queued_groups=8, overflow_action="drop_oldest")
    by_name = kind in ("path", "http")
    sources: Iterator[WeightSource] = itertools.cycle(
        [model if by_name else load_file(model / WEIGHTS) for model in models]
    )

    with (
        BufferClient(address) as client,
        publisher_of(kind, folder) as publisher,
        client.session(folder.name, policy=policy, tasks=tasks(), publisher=publisher) as session,
        worker(
            *(address, folder.name, folder / f"{folder.name}.log"),
            *("--engine", url, "--base-model", str(models[0]), "--pause-mode", mode, "--groups-per-engine", "8"),
            *("--weights-dir", str(folder / "weights"), "--drain-grace-s", "5"),
        ),
    ):
        session.publish(next(sources))
        session.wait_for_engines(1)
        window(session, options.seconds / 2, None)
        without, updated = [window(session, options.seconds, None)], []
        for _ in range(options.repeats):
            updated.append(window(session, options.seconds, lambda: void(session.publish(next(sources)))))
            without.append(window(session, options.seconds, None))
    ratios = [
        with_.tokens_per_s / statistics.mean((a.tokens_per_s, b.tokens_per_s))
        for with_, (a, b) in zip(updated, itertools.pairwise(without), strict=True)
    ]
    reloads = [ms for each in updated for ms in each.reload_ms]
    return {
        "mode": mode,
        "kind": kind,
        "tokens_per_s_none": round(statistics.median(each.tokens_per_s for each in without)),
        "tokens_per_s_updates": round(statistics.median(each.tokens_per_s for each in updated)),
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "reload_ms_median": round(statistics.median(reloads)),
        "updates": len(reloads),
    }


def void(_: object) -> None:
    """Forget a result."""


def lines(report: dict[str, Any]) -> list[str]:
    """The table."""
    head = ("mode, kind", "tokens/s, none", "every 2 s", "ratio", "its range", "reload ms", "updates")
    rows = [
        (
            f"{row['mode']}, {row['kind']}",
            row["tokens_per_s_none"],
            row["tokens_per_s_updates"],
            row["ratio_median"],
            f"{row['ratio_min']} to {row['ratio_max']}",
            row["reload_ms_median"],
            row["updates"],
        )
        for row in report["rows"]
    ]
    return table(head, rows)


async def run(options: argparse.Namespace, at: Path) -> dict[str, Any]:
    """Start a server and a service, measure every mode and kind."""
    models = (at / "model-0", at / "model-1")
    for model in models:
        make_model(model, hidden=options.hidden, layers=options.layers, dtype="float32")
    size_bytes = sum(file.stat().st_size for file in models[0].glob("*.safetensors"))
    server = SglangServerOptions(
        python=options.sglang_python,
        model_path=models[0],
        log_path=at / "sglang.log",
        dtype="float32",
        context_length=512,
        extra_flags=("--skip-tokenizer-init",),
        stop_grace_s=0.5,
    )
    report: dict[str, Any] = {
        "every_s": EVERY_S,
        "window_s": options.seconds,
        "weights_bytes": size_bytes,
        "hidden": options.hidden,
        "layers": options.layers,
        "cores": os.cpu_count(),
        "rows": [],
    }
    cells = [(mode, "path") for mode in options.mode] + [("retract", kind) for kind in options.kind if kind != "path"]
    async with SglangLauncher(server) as launcher:
        with service(at, "process") as served:
            print(f"weights of {size_bytes / 1e6:.1f} MB; {'mode':8} {'kind':11} none, updates, ratio", flush=True)
            for mode, kind in cells:
                row = await asyncio.to_thread(
                    measure, served.address, launcher.base_url, models, mode, kind, options, at
                )
                report["rows"].append(row)
                print(row, flush=True)
    return report


def main() -> None:
    """Measure, print a table, write bench/results/reload.json and the table in docs."""
    parser = argparse.ArgumentParser(prog="python -m bench.reload", description=__doc__.splitlines()[0])
    parser.add_argument("--sglang-python", type=Path, default=Path(".venv-sglang/bin/python"))
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=12.0, help="length of a window (default 12)")
    parser.add_argument("--repeats", type=int, default=4, help="windows with updates (default 4)")
    parser.add_argument("--mode", choices=MODES, nargs="*", default=list(MODES))
    parser.add_argument("--kind", choices=KINDS, nargs="*", default=list(KINDS), help="others than path: retract alone")
    parser.add_argument("--quick", action="store_true", help="one repeat, nothing written")
    options = parser.parse_args()
    if options.quick:
        options.repeats = 1
    with tempfile.TemporaryDirectory(prefix="rollout-buffer-reload-") as at:
        report = asyncio.run(run(options, Path(at)))
    print("\n".join(lines(report)))
    if not options.quick:
        _RESULTS.write_text(json.dumps(report, indent=2) + "\n")
        print(f"\nwritten to {_RESULTS} and {put('bench-reload', lines(report))}")


if __name__ == "__main__":
    main()
