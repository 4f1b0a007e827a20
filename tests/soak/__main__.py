"""Soak of one service, phase by phase (`make soak`): nothing grows with what has passed through, and nothing is left.

Phases: groups of 1 KB, groups of 1 MB, a real worker and session, runs that are made and deleted, workers
under new names. Each has a service and a store of its own. It fails where memory of a process or of the store grows by
a straight line over the phase's second half. It fails too where descriptors, keys of the store or files are left at its
end. A phase that has passed in this size is not done again, so an interrupted soak goes on with the phase that it was
in.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import redis

from buffer_service.store.keys import index_key
from tests.fuzz.verdicts import Failure, Verdicts
from tests.fuzz.watch import SAMPLE_S, Watch, growth
from tests.soak.comers import come_and_go, make_and_delete
from tests.soak.loop import PULL_TIMEOUT_S, Load, Loop
from tests.support.service import ServiceProcess, running_service
from tests.workers.process import worker_process
from trainer_client import BufferClient, SamplingParams, SessionOptions, Task

OUT = Path("bench/out/soak")
RUN = "soak"
SIZES = {
    "small": (30_000, 10_000_000),
    "large": (400, 100_000),
    "clients": (6_400, 640_000),
    "runs": (200, 10_000),
    "workers": (400, 10_000),
}
"""Size of each phase: of the short form, and in full."""
GROWTH_BYTES, STORE_GROWTH_BYTES = 16 << 20, 4 << 20
"""Growth of a process, and of the store by its own count, in the second half. In full that is 3 bytes a small group,
in the short form 1 KB."""
SETTINGS = {"rpc_processes": 1, "log_format": "json", "recent_bytes": 1 << 20, "direct_payloads": True}


class Soak:
    """One phase on a service of its own."""

    def __init__(self, service: ServiceProcess, size: int, seed: int) -> None:
        self.service = service
        self.size = size
        self.seed = seed
        self.verdicts = Verdicts(size)
        self.store = redis.Redis(unix_socket_path=str(next(service.data_dir.rglob("*.sock"))))
        service.metric("nothing")  # The page has connected to the store.
        self.watch = Watch(service, GROWTH_BYTES)
        self.queue_bytes = 0
        """Size of a full queue: whether it is full may differ from the first sample to the last."""
        self._files = _files(service.data_dir)
        self._used: list[int] = []
        self._recorded: list[int] = []
        self._sent: list[int] = []
        self._lock = threading.Lock()

    def tell(self, count: int) -> None:
        """Count what has passed."""
        with self._lock:
            self.verdicts.sent["soak"] += count

    def sample(self, over: threading.Event) -> None:
        """Take samples until it is over."""
        while not over.wait(SAMPLE_S):
            self.watch.take(self.verdicts.sent.total())
            self._sent.append(self.verdicts.sent.total())
            self._used.append(self.store.info("memory")["used_memory"])
            self._recorded.append(self.store.memory_usage(index_key(RUN, "record")) or 0)

    def check(self) -> dict[str, float]:
        """Check what is there when all has gone; returns MiB by which things grew in the second half."""
        half = [i for i, sent in enumerate(self._sent) if sent >= self._sent[-1] / 2]
        # A recording is as long as its million events; before, it grows.
        recorded = growth([self._recorded[i] for i in half])
        used = growth([self._used[i] - self._recorded[i] for i in half])
        if used > STORE_GROWTH_BYTES + self.queue_bytes:
            self.verdicts.fail(Failure(f"the store's used_memory grew by {used / (1 << 20):.0f} MiB", "used_memory"))
        asyncio.run(self.watch.check(self.verdicts, apart=recorded + self.queue_bytes))
        left = _files(self.service.data_dir) - self._files
        if left:
            self.verdicts.fail(Failure(f"files are left: {sorted(left)[:20]}", "files"))
        return {**self.watch.grown(), "used_memory": used / (1 << 20)}


def small(soak: Soak) -> None:
    """Groups of 1 KB."""
    _loop(soak, Load(soak.size, (55, 55), 256))


def large(soak: Soak) -> None:
    """Groups of 1 MB, in the order of submission."""
    more: dict[str, object] = {
        "order": "submission",
        "order_window_groups": 64,
        "stale_action": "wait",
        "max_queued_groups": 96,
    }
    _loop(soak, Load(soak.size, (14_000,) * 8, 8), **more)


def runs(soak: Soak) -> None:
    """Runs with something in each place."""
    make_and_delete(soak.service.address, soak.size, soak.tell)


def clients(soak: Soak) -> None:
    """Groups of 1 KB by a worker and a session as users start them; this process is the trainer."""
    tasks = (
        Task(group_size=2, sampling=SamplingParams(max_new_tokens=48), prompt_token_ids=[1, 2, 3, 4])
        for _ in range(soak.size)
    )
    policy = Load(soak.size, (52, 52), 64).policy(environments={})
    options = SessionOptions(pull_timeout_s=PULL_TIMEOUT_S)
    flags = ("--simulate", "--engines", "4", "--length-median", "32", "--tokens-per-s", "10000")
    address = soak.service.address
    with (
        worker_process(address, RUN, soak.service.data_dir.parent / "worker", *flags) as worker,
        BufferClient(address) as client,
        client.session(RUN, policy=policy, tasks=tasks, options=options) as session,
    ):
        soak.watch.beside(worker=worker.process.pid, trainer=os.getpid())
        for batch in session:
            session.publish()
            session.checkpoint()
            soak.tell(len(batch.groups))
        if worker.stop():
            soak.verdicts.fail(Failure(f"the worker failed: {worker.said()[-2_000:]}", "worker"))
    _delete(soak)


def workers(soak: Soak) -> None:
    """Workers of one run, each under a name of its own."""
    come_and_go(soak.service.address, soak.store, RUN, soak.size, soak.tell)
    _delete(soak)


def _loop(soak: Soak, load: Load, **more: object) -> None:
    soak.queue_bytes = 4 * load.batch_groups * load.group_bytes
    loop = Loop(soak.service.address, RUN, load, soak.seed, soak.tell)
    loop.run(load.policy(**more))
    with BufferClient(soak.service.address) as client:
        ledger = client.ledger(RUN)
        if not ledger.balanced:
            soak.verdicts.fail(Failure(f"the ledgers do not balance: {ledger}", "ledger"))
    _delete(soak)


def _delete(soak: Soak) -> None:
    with BufferClient(soak.service.address) as client:
        client.delete_run(RUN)


PHASES: dict[str, Callable[[Soak], None]] = {
    "small": small,
    "large": large,
    "clients": clients,
    "runs": runs,
    "workers": workers,
}


def run_phase(name: str, size: int, seed: int) -> dict[str, object]:
    """One phase; its result, with the failures."""
    with tempfile.TemporaryDirectory() as folder, running_service(Path(folder), **SETTINGS) as service:
        soak, over = Soak(service, size, seed), threading.Event()
        sampling = threading.Thread(target=soak.sample, args=(over,))
        sampling.start()
        began = time.monotonic()
        try:
            PHASES[name](soak)
        finally:
            took = time.monotonic() - began
            over.set()
            sampling.join()
        grown = {what: round(mib, 1) for what, mib in soak.check().items()}
        resident = {what: round(mib, 1) for what, mib in soak.watch.resident().items()}
        soak.store.close()
    failures = [str(failure) for failure in soak.verdicts.failures.values()]
    facts = {"phase": name, "size": size, "seed": seed, "seconds": round(took, 1), "a_second": round(size / took, 1)}
    return {**facts, "grown_mib": grown, "resident_mib": resident, "failures": failures}


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--share", type=float, default=0.0, help="of the full size, up to 1; default: the short form")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--phases", nargs="+", choices=list(PHASES), default=list(PHASES))
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder of the results (default {OUT})")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in options.phases:
        short, full = SIZES[name]
        size = max(short, round(options.share * full))
        note = options.out / f"{name}-{size}-{options.seed}.json"
        if note.exists():
            print(f"soak: {name} of {size:,} has passed before: {note}")
            continue
        result = run_phase(name, size, options.seed)
        hours = full / float(str(result["a_second"])) / 3600
        print(f"soak: {name} {json.dumps(result)}; {full:,} take {hours:.1f} h at this rate", flush=True)
        if result["failures"]:
            failed = True
        else:
            note.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if failed else 0


def _files(folder: Path) -> set[str]:
    """Files without the numbers in their names: logs of the store are written anew under the next."""
    return {
        "".join(letter for letter in str(path.relative_to(folder)) if not letter.isdigit())
        for path in folder.rglob("*")
    }


if __name__ == "__main__":
    sys.exit(main())
