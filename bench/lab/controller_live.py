"""Live loops under a target of staleness, whose engine becomes faster or slower, or its responses longer."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.live_loop.loop import run
from bench.live_loop.setting import Setting
from trainer_client import BufferClient

BEFORE, AFTER, MEASURED = 20, 80, 30
SPEED = 300.0


def _setting(name: str, rho: float, target: float, jump: str, preset: str = "queue_drop(2)", **fields: str) -> Setting:
    speed, length = {"engines × 2": (2.0, 1.0), "engines × ½": (0.5, 1.0), "lengths × 2": (1.0, 2.0)}[jump]
    return Setting(
        name=f"{name}, {jump}",
        preset=preset,
        fields={"target_staleness_milli": round(1_000 * target), **fields},
        rho=rho,
        tokens_per_s=SPEED,
        jump_step=BEFORE,
        jump_speed=speed,
        jump_length=length,
    )


LIVE = (
    _setting("whole batches, ρ 0.7", 0.7, 1.5, "engines × 2"),
    _setting("whole batches, ρ 1.4", 1.4, 1.25, "engines × ½"),
    _setting("whole batches, ρ 0.7", 0.7, 1.5, "lengths × 2"),
    _setting("micro-batches, ρ 0.7", 0.7, 1.0, "engines × 2", preset="streaming(4)"),
    _setting("micro-batches, ρ 1.4", 1.4, 1.0, "lengths × 2", preset="streaming(4)"),
    _setting("tokens, ρ 1.0", 1.0, 1.0, "engines × ½", target_measure="token"),
)


def live(numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Rows of the live loops of these numbers, all where none is given, as they end."""
    for number in numbers or range(len(LIVE)):
        setting = LIVE[number]
        said: dict[str, Any] = {}

        def look(client: BufferClient, said: dict[str, Any] = said) -> None:
            control = client.run("live").control
            if control is None:
                raise RuntimeError("nothing was decided")
            said.update(asdict(control))

        with tempfile.TemporaryDirectory(prefix="rollout-buffer-live-") as directory:
            got = run(setting, Path(directory), steps=MEASURED, warmup=BEFORE + AFTER - MEASURED, at_end=look)
        yield {"setting": asdict(setting), "got": asdict(got), **said}
