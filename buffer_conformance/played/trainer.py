"""The trainer that the kit plays against a worker: it submits tasks, pulls single groups, commits, and publishes."""

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from buffer_conformance.direct import Direct
from buffer_conformance.record import Record
from buffer_wire.errors import BatchNotReady, RolloutBufferError, RunPaused
from rollout_buffer.v1 import runs_pb2, tasks_pb2, weights_pb2

ENVIRONMENT = "conformance"
GROUP_SIZE = 2
PROMPT = (5, 6, 7, 8, 9, 10, 11)
_PULL_WAIT_MS = 500


class KitTrainer:
    """Use `run` as a task beside the scenarios; `trained` holds the ids of the tasks whose groups were pulled."""

    def __init__(self, direct: Direct, record: Record, lease_ttl_s: float, weights: Path | None) -> None:
        self._direct = direct
        self._record = record
        self._ttl_ms = round(lease_ttl_s * 1000)
        self._weights = weights
        self._cursor = 0
        self._term = 0
        self._step = 0
        self._version = 0
        self._chunks = 0
        self.trained: set[str] = set()

    async def begin(self) -> None:
        """Create the run and take it over."""
        policy = runs_pb2.RunPolicy(
            batch_groups=1,
            max_queued_groups=10_000,
            lease_ttl_ms=self._ttl_ms,
            max_attempts=1_000,
            retry_backoff_ms=0,
            retained_steps=1_000,
        )
        await self._direct.call("CreateRun", policy=policy)
        reply = await self._direct.call("Resume", request_id="kit")
        self._term, self._cursor, self._step, self._version = (
            reply.term,
            reply.cursor,
            reply.next_step,
            reply.version,
        )

    async def submit(self, count: int, *, max_new_tokens: int = 32) -> list[str]:
        """Add tasks of token ids; returns their ids."""
        self._chunks += 1
        ids = [f"t{self._chunks}-{i}" for i in range(count)]
        tasks = [_task(task_id, max_new_tokens) for task_id in ids]
        await self._direct.call(
            "SubmitTasks",
            term=self._term,
            expected_cursor=self._cursor,
            cursor=self._cursor + count,
            request_id=f"s{self._chunks}",
            tasks=tasks,
        )
        self._cursor += count
        return ids

    async def publish(self) -> None:
        """Publish the next version and commit what was pulled."""
        self._version += 1
        manifest = _manifest(self._weights) if self._weights is not None else None
        commit = self._step - 1 if self._step else None
        await self._direct.call(
            "Publish", term=self._term, version=self._version, manifest=manifest, commit_through_step=commit
        )
        self._record.mark("published", term=self._term, version=self._version)

    async def run(self) -> None:
        """Pull and commit until cancelled."""
        while True:
            try:
                replies = await self._direct.stream(
                    "PullBatch", term=self._term, step=self._step, world_size=1, wait_ms=_PULL_WAIT_MS
                )
            except BatchNotReady:
                continue
            except RolloutBufferError as error:
                if not (error.retryable or isinstance(error, RunPaused)):
                    raise
                await asyncio.sleep(_PULL_WAIT_MS / 1000)
                continue
            self.trained |= _task_ids(replies)
            await self._direct.call("Commit", term=self._term, through_step=self._step)
            self._step += 1


def _task(task_id: str, max_new_tokens: int) -> tasks_pb2.Task:
    return tasks_pb2.Task(
        task_id=task_id,
        prompt_token_ids=PROMPT,
        group_size=GROUP_SIZE,
        sampling=tasks_pb2.SamplingParams(max_new_tokens=max_new_tokens, temperature=1.0),
        environment=ENVIRONMENT,
        metadata_json=f'{{"answer": "{task_id}"}}',
    )


def _task_ids(replies: Sequence[Any]) -> set[str]:
    return {delivered.group.header.task_id for reply in replies for delivered in reply.groups}


def _manifest(folder: Path) -> weights_pb2.WeightManifest:
    files = [
        weights_pb2.WeightFile(
            name=path.relative_to(folder).as_posix(),
            size_bytes=path.stat().st_size,
            sha256=hashlib.sha256(path.read_bytes()).digest(),
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]
    return weights_pb2.WeightManifest(files=weights_pb2.FilesManifest(base_url=str(folder.resolve()), files=files))
