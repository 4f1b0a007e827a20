"""The loop on two real SGLang engines on CPU, with random weights: windows of one run that take turns with a policy.

Training is a sleep as long as the engines needed for a batch at the start, so ρ is about 1. Responses end where the
model draws its end token: they differ in length. Weights travel as files of the same machine.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from bench.engine_rate import VOCABULARY, make_model
from bench.ours import service
from bench.worker import worker
from rollout_workers.engine.sglang.launch import SglangLauncher
from rollout_workers.engine.sglang.server import SglangServerOptions
from trainer_client import BufferClient, TrainerSession
from trainer_client.policy import Policy
from trainer_client.publish import FilesPublisher
from trainer_client.state import RunState
from trainer_client.tasks import SamplingParams, Task

ENGINES = 2
GROUPS, GROUP_SIZE, MOST_TOKENS, PROMPT = 48, 4, 256, 12
GROUPS_PER_ENGINE = 10
CALIBRATION, SETTLING = 3, 1
"""Steps before the first window, without training; steps before each window that do not count."""
_POLL_S = 0.05


def windows(
    policy: Policy, turns: Sequence[Mapping[str, object]], directory: Path, *, sglang_python: Path, steps: int
) -> list[dict[str, Any]]:
    """Run one loop, with the fields of each turn in effect for a window of so many steps; what each window measured."""
    return asyncio.run(_windows(policy, turns, directory, sglang_python, steps))


async def _windows(
    policy: Policy, turns: Sequence[Mapping[str, object]], at: Path, python: Path, steps: int
) -> list[dict[str, Any]]:
    models = (at / "model-0", at / "model-1")
    for model in models:
        make_model(model, hidden=64, layers=2, dtype="float32")
    launchers = [
        SglangLauncher(
            SglangServerOptions(
                python=python,
                model_path=models[0],
                log_path=at / f"sglang-{number}.log",
                dtype="float32",
                context_length=512,
                extra_flags=("--skip-tokenizer-init",),
                stop_grace_s=0.5,
            )
        )
        for number in range(ENGINES)
    ]
    try:
        urls = await asyncio.gather(*(launcher.start() for launcher in launchers))
        return await asyncio.to_thread(_measured, policy, turns, at, models, urls, steps)
    finally:
        await asyncio.gather(*(launcher.stop() for launcher in launchers))


def _measured(
    policy: Policy,
    turns: Sequence[Mapping[str, object]],
    at: Path,
    models: Sequence[Path],
    urls: Sequence[str],
    steps: int,
) -> list[dict[str, Any]]:
    flags = [
        *(word for url in urls for word in ("--engine", url)),
        *("--base-model", str(models[0]), "--groups-per-engine", str(GROUPS_PER_ENGINE)),
        *("--weights-dir", str(at / "weights"), "--drain-grace-s", "5"),
    ]
    found = []
    with (
        service(at, "process") as served,
        BufferClient(served.address) as client,
        FilesPublisher(at / "published", serve="path") as publisher,
        client.session("real", policy=policy, tasks=_tasks(), publisher=publisher) as session,
        worker(served.address, "real", at / "worker.log", *flags),
        _Loads(served.address) as loads,
    ):
        trainer = _Trainer(session, models, loads)
        trainer.train(1)
        trainer.train_s = trainer.train(CALIBRATION)
        for fields in turns:
            session.update_policy(**fields)
            trainer.train(SETTLING)
            loads.lags.clear()
            before = session.state()
            period_s = trainer.train(steps)
            found.append(_window(before, session.state(), period_s, loads.lags))
    return found


def _window(before: RunState, after: RunState, period_s: float, lags: Sequence[float]) -> dict[str, Any]:
    def grown(name: str) -> int:
        return after.statistics[name] - before.statistics[name]

    groups = grown("assembled_groups")
    return {
        "publish_lag_s": sum(lags) / max(1, len(lags)),
        "staleness": grown("staleness_sum") / groups,
        "token_staleness": grown("token_staleness_milli_sum") / 1_000 / grown("assembled_response_tokens"),
        "stale_groups": after.ledger.groups.dropped_stale.groups - before.ledger.groups.dropped_stale.groups,
        "period_s": period_s,
    }


class _Trainer:
    """Takes micro-batches, sleeps their share of a step, publishes the other model after the last."""

    def __init__(self, session: TrainerSession, models: Sequence[Path], loads: "_Loads") -> None:
        self._session = session
        self._micro_batches = session.micro_batches()
        self._sources = itertools.cycle(reversed(models))
        self._loads = loads
        self.train_s = 0.0
        """Time of a step."""

    def train(self, steps: int) -> float:
        """So many steps, to the publish of the last; returns the mean period in seconds."""
        began, left = time.perf_counter(), steps
        for micro in self._micro_batches:
            time.sleep(self.train_s * len(micro.groups) / GROUPS)
            if micro.final:
                at = time.monotonic()
                self._loads.published = (self._session.publish(next(self._sources)), at)
                left -= 1
                if not left:
                    return (time.perf_counter() - began) / steps
        raise RuntimeError("the run has ended")


class _Loads:
    """Times from a publish until both engines have said that they loaded it."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.published: tuple[int, float] | None = None
        """The newest version, and the time at which its publish was begun; None: all have it."""
        self.lags: list[float] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        with BufferClient(self._address) as client:
            while not self._ended.wait(_POLL_S):
                if (published := self.published) is None:
                    continue
                engines = client.run("real").engines
                if engines and min(engine.loaded.version for engine in engines) >= published[0]:
                    self.lags.append(time.monotonic() - published[1])
                    if self.published == published:
                        self.published = None


def _tasks() -> Iterator[Task]:
    sampling = SamplingParams(max_new_tokens=MOST_TOKENS)
    for number in itertools.count():
        prompt = [3 + (number + at) % (VOCABULARY - 3) for at in range(PROMPT)]
        yield Task(group_size=GROUP_SIZE, sampling=sampling, prompt_token_ids=prompt)
