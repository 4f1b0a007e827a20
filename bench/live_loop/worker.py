"""The worker of a live loop, in a process of its own: `python -m bench.live_loop.worker` with JSON on standard input.

It is the worker that users start, on one simulated engine; ours are the engine's clock, which counts its sleeps, and a
note of the time at which it had loaded each version. Both are printed as JSON when SIGTERM has drained the worker.
"""

import asyncio
import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from bench.live_loop.setting import LENGTH_MEDIAN, Setting
from bench.live_loop.sleeps import CountedClock, Sleeps

_DRAIN_TIMEOUT_S = 30


@dataclass(slots=True)
class Account:
    """Report of a worker's process at its end."""

    sleeps: Sleeps = field(default_factory=Sleeps)
    """Sleeps of the engine."""
    loaded_at: dict[int, float] = field(default_factory=dict)
    """Seconds on the monotonic clock, by version; the clock is one that all processes of a machine share."""


def main() -> None:
    """Work until SIGTERM."""
    import structlog

    from bench.worker import no_reward
    from rollout_workers.engine.options import SimulatedOptions
    from rollout_workers.engine.simulated.answers import AnswerOptions
    from rollout_workers.engine.simulated.engine import SimulatedEngine, SimulatedEngineOptions
    from rollout_workers.engine.types import Engine
    from rollout_workers.options import WorkerOptions
    from rollout_workers.worker import Worker

    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    told = json.load(sys.stdin)
    setting, clock = Setting(**told["setting"]), CountedClock()

    account = Account(clock.sleeps)

    class NotingEngine(SimulatedEngine):
        """Knows when it had loaded what."""

        async def load_files(self, path: Path, version_label: str) -> None:
            await super().load_files(path, version_label)
            version = int(version_label.partition(".")[2])
            account.loaded_at[version] = time.monotonic()
            if 0 < setting.jump_step <= version:
                self.options = replace(
                    self.options,
                    tokens_per_s=setting.tokens_per_s * setting.jump_speed,
                    answers=replace(self.options.answers, length_median=LENGTH_MEDIAN * setting.jump_length),
                )

    class Host:
        """Host of the one engine."""

        base_model: str | None = None
        ended = False
        why_ended = ""

        def __init__(self) -> None:
            answers = AnswerOptions(
                length_median=LENGTH_MEDIAN, length_sigma=setting.length_sigma, seed=int(told["seed"])
            )
            options = SimulatedEngineOptions(
                tokens_per_s=setting.tokens_per_s, slots=setting.concurrency, load_s=setting.load_s, answers=answers
            )
            self.engine = NotingEngine(options, clock=clock)

        async def open(self) -> Engine:
            return self.engine

        async def revive(self) -> Engine:
            return self.engine

        async def close(self) -> None:
            await self.engine.close()

    async def work() -> None:
        options = WorkerOptions(
            address=told["address"],
            run_id=told["run_id"],
            reward="bench.worker:no_reward",
            simulated=SimulatedOptions(slots=setting.concurrency),
            groups_per_engine=setting.groups_per_engine,
            pause_mode="in_place",
            weights_dir=Path(told["directory"]) / "weights",
            drain_grace_s=5.0,
            progress_every_s=0,
        )
        worker = Worker(options, reward=no_reward, hosts=[Host()])
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
        await worker.run()

    asyncio.run(work())
    print(json.dumps(asdict(account)))


@contextmanager
def worker(address: str, run_id: str, setting: Setting, *, seed: int, directory: Path) -> Iterator[Account]:
    """A worker of the run; the account that is yielded is filled in when the block has ended.

    Raises RuntimeError when the worker ended by itself or with an error; its log is in `directory`.
    """
    told = {"address": address, "run_id": run_id, "setting": asdict(setting), "seed": seed, "directory": str(directory)}
    command = [sys.executable, "-m", __name__]
    log_path, account = directory / "worker.log", Account()
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        if process.stdin is None:
            raise TypeError("the worker has no standard input")
        process.stdin.write(json.dumps(told).encode())
        process.stdin.close()
        process.stdin = None
        try:
            yield account
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                printed, _ = process.communicate(timeout=_DRAIN_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                printed, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"the worker ended with code {process.returncode}:\n{log_path.read_text()[-4_000:]}")
    last = json.loads(printed.decode().splitlines()[-1])
    account.sleeps = Sleeps(**last["sleeps"])
    account.loaded_at = {int(version): at for version, at in last["loaded_at"].items()}


if __name__ == "__main__":
    main()
