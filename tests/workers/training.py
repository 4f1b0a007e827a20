"""The trainer's side of the tests with worker processes: speeds of the engines, endless tasks, and weights."""

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from trainer_client import SamplingParams, SessionOptions, Task

FAST = ("--simulate", "--tokens-per-s", "400", "--groups-per-engine", "8", "--lease-wait-s", "1")
SLOW = ("--simulate", "--tokens-per-s", "20", "--groups-per-engine", "4", "--lease-wait-s", "1")
OPTIONS = SessionOptions(pull_timeout_s=60)


def endless(max_new_tokens: int = 48, group_size: int = 4) -> Iterator[Task]:
    for i in itertools.count():
        yield Task(
            task_id=f"t{i:05d}",
            group_size=group_size,
            sampling=SamplingParams(max_new_tokens=max_new_tokens),
            prompt_token_ids=[1 + i % 7, 2, 3],
            metadata={"i": i},
        )


def write_weights(content: bytes) -> Callable[[Path], object]:
    return lambda directory: (directory / "model.safetensors").write_bytes(content)


def until(holds: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"still not: {what}"
        time.sleep(0.05)


def seen_once(seen: set[str], task_ids: list[str]) -> None:
    assert len(set(task_ids)) == len(task_ids)
    assert seen.isdisjoint(task_ids)
    seen.update(task_ids)
