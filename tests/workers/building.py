"""Tasks, leases, options and files of weights for the tests of the worker."""

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rollout_buffer.v1 import tasks_pb2, weights_pb2
from rollout_workers.engine.options import SimulatedOptions
from rollout_workers.engine.types import FinishReason, GeneratedSample, VersionSpan, new_rid
from rollout_workers.options import WorkerOptions

REWARD = "tests.workers.building:length_reward"


def length_reward(sample: Any) -> float:
    return float(len(sample.response_ids))


def task(task_id: str = "t1", *, group_size: int = 4, max_new_tokens: int = 16, **more: Any) -> tasks_pb2.Task:
    sampling = tasks_pb2.SamplingParams(max_new_tokens=max_new_tokens)
    if "messages" not in more:
        more.setdefault("prompt_token_ids", [1, 2, 3])
    return tasks_pb2.Task(task_id=task_id, group_size=group_size, sampling=sampling, **more)


def lease(of: tasks_pb2.Task | None = None, *, attempt: int = 1, **more: Any) -> tasks_pb2.Lease:
    of = of or task()
    return tasks_pb2.Lease(
        lease_id=f"{of.task_id}/0/{attempt}", task=of, attempt=attempt, ttl_ms=more.pop("ttl_ms", 60_000), **more
    )


def generated(
    index: int, ids: list[int], *spans: tuple[str, int, int], finish: FinishReason = "stop"
) -> GeneratedSample:
    return GeneratedSample(
        rid=new_rid(),
        sample_index=index,
        output_ids=np.array(ids, np.int32),
        logprobs=np.array([-token / 100 for token in ids], np.float32),
        spans=tuple(VersionSpan(*span) for span in spans)
        if spans
        else (VersionSpan("1.0", 0, len(ids)),)
        if ids
        else (),
        finish_reason=finish,
    )


def options(address: str, tmp_path: Path, **more: Any) -> WorkerOptions:
    more.setdefault("simulated", SimulatedOptions(tokens_per_s=2_000.0, length_median=12.0))
    more.setdefault("worker_id", "w")
    more.setdefault("lease_wait_s", 0.5)
    more.setdefault("drain_grace_s", 5.0)
    more.setdefault("progress_every_s", 0.0)
    more.setdefault("reward", REWARD)
    more.setdefault("run_id", "r")
    return WorkerOptions(address=address, weights_dir=tmp_path / "weights", **more)


def weight_files(directory: Path, content: dict[str, bytes]) -> weights_pb2.FilesManifest:
    """Files on the disk and their manifest, by path."""
    manifest = weights_pb2.FilesManifest(base_url=str(directory))
    for name, data in content.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
        manifest.files.add(name=name, size_bytes=len(data), sha256=hashlib.sha256(data).digest())
    return manifest


async def eventually(holds: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for a condition over state that tells nobody of its changes."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not holds():
        assert asyncio.get_running_loop().time() < deadline, "the condition does not come to hold"
        await asyncio.sleep(0.01)


async def time_passes(seconds: float) -> None:
    """Not a synchronisation: engines decode meanwhile, an outage lasts, or something must not happen."""
    await asyncio.sleep(seconds)
