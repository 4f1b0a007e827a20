"""The calls of a trainer, of its ranks and of its feeder, recorded."""

import json
from dataclasses import dataclass
from typing import Any

from buffer_wire.errors import PendingFull
from tests.chaos.checker.events import Facts
from tests.faults.history import History
from tests.faults.made_groups import GROUP_SIZE, PROMPT, digest
from trainer_client import AsyncBufferClient, Batch, ClientOptions, FilesManifest, SamplingParams, Task, WeightFile
from trainer_client.client.requests import Submission

PULL_TIMEOUT_S = 90.0
OPTIONS = ClientOptions(timeout_s=90.0, attempt_timeout_s=5.0, transfer_timeout_s=5.0)
SAMPLING = SamplingParams(max_new_tokens=16)


@dataclass
class Caller:
    """One client of one term, every call of which is recorded."""

    history: History
    run_id: str
    client: AsyncBufferClient
    name: str
    term: int

    def _call(self, kind: str, **given: Any) -> Any:
        return self.history.call(self.name, kind, term=self.term, **given)

    async def pull(
        self, step: int, micro_batch: int, rank: int, world_size: int, train_version: int | None, groups: int | None
    ) -> Batch:
        where = {"step": step, "micro_batch": micro_batch, "rank": rank, "world_size": world_size}
        async with self._call("pull", **where, train_version=train_version, batch_groups=groups) as op:
            batch = await self.client.pull(
                self.run_id,
                term=self.term,
                step=step,
                rank=rank,
                world_size=world_size,
                train_version=train_version,
                micro_batch=micro_batch,
                batch_groups=groups,
                timeout_s=PULL_TIMEOUT_S,
            )
            op.reply = _batch_facts(batch)
        return batch

    async def publish(self, version: int, files: FilesManifest, commit_through: int | None) -> None:
        given = {
            "version": version,
            "manifest": files.base_url,
            "commit_through": commit_through,
        }
        async with self._call("publish", **given) as op:
            done = await self.client.publish(
                self.run_id,
                term=self.term,
                version=version,
                manifest=files,
                commit_through=commit_through,
            )
            op.reply = {
                "published": [done.version.term, done.version.version],
                "committed_steps": done.committed_steps,
            }

    async def commit(self, through: int) -> None:
        async with self._call("commit", through=through) as op:
            steps = await self.client.commit(self.run_id, term=self.term, through_step=through)
            op.reply = {"committed_steps": steps}

    async def checkpoint(self, through: int) -> None:
        async with self._call("checkpoint", through=through) as op:
            steps = await self.client.checkpoint(self.run_id, term=self.term, through_step=through)
            op.reply = {"checkpointed_steps": steps}

    async def submit(self, cursor: int, count: int) -> int:
        """Feed so many prompts from `cursor` on; the cursor after them."""
        items = list(range(cursor, cursor + count))
        submission = Submission(
            term=self.term,
            expected_cursor=cursor,
            cursor=cursor + count,
            feeder_state=str(cursor + count).encode(),
            tasks=[
                Task(
                    group_size=GROUP_SIZE,
                    sampling=SAMPLING,
                    prompt_token_ids=[1] * PROMPT,
                    environment=("sums", "words")[item % 2],
                    metadata={"item": item},
                )
                for item in items
            ],
        )
        async with self._call("submit", expected_cursor=cursor, cursor=cursor + count) as op:
            done = await self.client.submit_tasks(self.run_id, submission, on_wait=_not_if_full)
            op.reply = {"cursor": done.cursor, "task_ids": list(done.task_ids)}
        return done.cursor


def _not_if_full(waiting: Any) -> None:
    if isinstance(waiting.error, PendingFull):
        raise waiting.error


def manifest(folder: str, version: int) -> FilesManifest:
    return FilesManifest(f"/{folder}/{version}", (WeightFile("model", 4, bytes(32)),))


def _batch_facts(batch: Batch) -> Facts:
    info = batch.info
    return {
        "final": info.final,
        "train_version": info.train_version,
        "replayed": info.replayed,
        "staleness_max": info.staleness_max,
        "totals": [info.total_groups, info.total_samples, info.total_tokens, info.total_loss_tokens],
        "shard": [info.shard_groups, info.shard_tokens],
        "groups": [
            {
                "group_id": f"{group.task_id}/{group.incarnation}",
                "digest": digest(group.header, group.payload),
                "sequence": group.sequence,
                "head": group.head_version,
                "item": json.loads(group.header.metadata_json)["item"],
            }
            for group in batch.groups
        ],
    }
