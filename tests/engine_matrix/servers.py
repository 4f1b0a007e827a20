"""SGLang servers for a whole module of tests, started side by side from the main thread."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout_workers.engine.sglang.launch import SglangLauncher
from rollout_workers.engine.sglang.server import SglangServerOptions
from tests.support.sglang_python import sglang_python

READY_TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True)
class Servers:
    """Running servers."""

    urls: tuple[str, ...]
    pids: tuple[int, ...]
    logs: tuple[Path, ...]


@contextlib.contextmanager
def sglang_servers(
    folder: Path,
    models: Sequence[Path],
    *,
    weight_version: str = "0",
    overlap: bool = False,
    max_running_requests: int = 32,
    max_total_tokens: int | None = None,
) -> Iterator[Servers]:
    """One server for each model, ready; they are gone afterwards. The event loop that owns them rests in between.

    `weight_version`: what they call these weights; a version, like 1.0, makes workers load what they begin with.
    """
    launchers = [
        SglangLauncher(
            SglangServerOptions(
                python=sglang_python(),
                model_path=model,
                log_path=folder / f"sglang-{i}.log",
                weight_version=weight_version,
                overlap_schedule=overlap,
                max_running_requests=max_running_requests,
                max_total_tokens=max_total_tokens,
                ready_timeout_s=READY_TIMEOUT_S,
                stop_grace_s=0.5,
            )
        )
        for i, model in enumerate(models)
    ]

    async def each(what: str) -> None:
        async with asyncio.TaskGroup() as group:
            for launcher in launchers:
                group.create_task(getattr(launcher, what)())

    with asyncio.Runner() as runner:
        try:
            runner.run(each("start"))
            yield Servers(
                tuple(launcher.base_url for launcher in launchers),
                tuple(launcher.pid or 0 for launcher in launchers),
                tuple(launcher.options.log_path for launcher in launchers),
            )
        finally:
            runner.run(each("stop"))
