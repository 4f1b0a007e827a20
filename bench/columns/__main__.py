"""`make bench-columns`: what routed experts cost a worker, the store and a trainer, by megabytes a sample.

A stub speaks SGLang's wire to a real worker. It generates at once, so that the time is that of everything else: the
events are received, the experts decoded and narrowed, the group pushed, pulled, and packed into tensors. Groups have 8
samples; each row's samples have the same tokens, once without experts and once with them. Processes: the stub, the
worker, the service with its Valkey, and this one, the trainer, on the machine's cores.
"""

import argparse
import itertools
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.columns import sizes
from bench.measure import cpu_s, forget_peak, resident_bytes
from bench.ours import service
from bench.tables import put, table, write_rows
from bench.worker import worker
from trainer_client import BufferClient, Policy, SamplingParams, SessionOptions, Task
from trainer_client.batch import Batch
from trainer_client.collate import pack

_RESULTS = Path(__file__).parents[1] / "results" / "columns.json"
_START_S = 60.0


def tokens_for(megabytes: float) -> int:
    """Response tokens of a sample whose experts take so many megabytes, at a byte for each."""
    return max(round(megabytes * 1e6 / (sizes.LAYERS * sizes.TOP_K)) - sizes.PROMPT, 100)


@contextmanager
def stub(directory: Path, positions: int) -> Iterator[str]:
    """URL of a running stub."""
    process = subprocess.Popen([sys.executable, "-m", "bench.columns.stub", str(directory), str(positions)])
    try:
        deadline = time.monotonic() + _START_S
        while not (directory / "url").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the stub did not start")
            time.sleep(0.1)
        yield (directory / "url").read_text()
    finally:
        process.kill()
        process.wait()


def tasks(tokens: int, columns: list[str], groups: int) -> Iterator[Task]:
    """So many tasks, of which the first warms up."""
    for i in range(groups):
        yield Task(
            task_id=f"t{i}",
            group_size=sizes.GROUP,
            sampling=SamplingParams(max_new_tokens=tokens),
            prompt_token_ids=[1 + i] * sizes.PROMPT,
            columns=columns,
        )


def measured(megabytes: float, columns: list[str], groups: int) -> dict[str, Any]:
    """One row: seconds and CPU a group, and the peaks of memory of the processes."""
    tokens = tokens_for(megabytes)
    with tempfile.TemporaryDirectory(prefix="bench-columns-") as scratch:
        directory = Path(scratch)
        (directory / "stub").mkdir()
        (directory / "service").mkdir()
        flags = ("--weights-dir", str(directory / "weights"), "--groups-per-engine", "1", "--progress-every-s", "0")
        with (
            stub(directory / "stub", sizes.PROMPT + tokens - 1) as url,
            service(directory / "service", "memory") as buffer,
            worker(buffer.address, "columns", directory / "worker.log", "--engine", url, *flags) as of_worker,
            BufferClient(buffer.address) as client,
            client.session(
                "columns",
                policy=Policy(batch_groups=1, max_queued_groups=1, overflow_action="block"),
                tasks=tasks(tokens, columns, groups),
                options=SessionOptions(pull_timeout_s=120.0),
            ) as session,
        ):
            processes = {"worker": (of_worker,), "service": buffer.pids, "trainer": (_own(),)}
            trained(next(session), columns)
            session.checkpoint()
            for pid in itertools.chain.from_iterable(processes.values()):
                forget_peak(pid)
            cpu = {name: cpu_s(pids) for name, pids in processes.items()}
            began, packing, received = time.perf_counter(), 0.0, 0
            for batch in itertools.islice(session, groups - 1):
                received += batch.received_bytes
                packing += trained(batch, columns)
                session.checkpoint()
            spent = time.perf_counter() - began
            row: dict[str, Any] = {
                "megabytes": megabytes if columns else 0,
                "tokens": sizes.PROMPT + tokens,
                "group_mb": round(received / (groups - 1) / 1e6, 1),
                "seconds": round(spent / (groups - 1), 3),
                "pack_s": round(packing / (groups - 1), 3),
            }
            for name, pids in processes.items():
                peak = sum(resident_bytes(pid, "VmHWM") for pid in pids)
                row[f"{name}_cpu_s"] = round((cpu_s(pids) - cpu[name]) / (groups - 1), 3)
                row[f"{name}_peak_mb"] = round(peak / 1e6)
            return row


def trained(batch: Batch, columns: list[str]) -> float:
    """Make a batch into tensors; returns how long that took."""
    began = time.perf_counter()
    packed = pack(batch, extras=columns)
    for name in columns:
        experts = packed.extras[name]
        if not isinstance(experts, torch.Tensor) or experts.shape[1:] != (sizes.LAYERS, sizes.TOP_K):
            raise RuntimeError(f"{name} is {experts}")
    return time.perf_counter() - began


def _own() -> int:
    return int(Path("/proc/self").readlink().name)


def text(row: dict[str, Any]) -> list[object]:
    """Cells of the page's table."""
    name = f"{row['megabytes']:g} MB a sample" if row["megabytes"] else f"none, {row['tokens']:,} tokens a sample"
    who = ("worker", "service", "trainer")
    cpu, memory = ([f"{row[f'{each}_{what}']:,}" for each in who] for what in ("cpu_s", "peak_mb"))
    return [name, f"{row['group_mb']:,.0f}", f"{row['seconds']:.2f}", *cpu, *memory]


def main(argv: list[str] | None = None) -> int:
    """Measure each size without and with experts, and write results and the page's table; 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.columns", description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, nargs="*", default=[1.0, 8.0, 30.0], help="experts of a sample")
    parser.add_argument("--groups", type=int, default=8, help="groups of a row, the first not measured (default 8)")
    parser.add_argument("--keep", action="store_true", help="leave the results and the page as they are")
    options = parser.parse_args(argv)
    rows = []
    for megabytes in options.megabytes:
        for columns in ([], ["routed_experts"]):
            rows.append(measured(megabytes, columns, options.groups))
            print(rows[-1], flush=True)
    if not options.keep:
        facts = {"samples": sizes.GROUP, "groups": options.groups - 1, "load": round(os.getloadavg()[2], 1)}
        write_rows(_RESULTS, {"rows": rows, **facts, "python": platform.python_version()})
        who = ["worker", "service", "trainer"]
        head = ["experts", "MB a group", "s", *(f"CPU s, {each}" for each in who), *(f"MB, {each}" for each in who)]
        put("columns", table(head, [text(row) for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
