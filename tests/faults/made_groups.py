"""Groups for histories: no two have the same bytes, and a digest says which one has come back."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from buffer_wire import layout
from buffer_wire.codec import join_group
from rollout_buffer.v1 import groups_pb2, tasks_pb2
from rollout_workers.versions import Version
from tests.chaos.checker.events import Facts

PROMPT = 3
GROUP_SIZE = 2


@dataclass(frozen=True)
class Made:
    """A group as a worker sends it."""

    header: groups_pb2.GroupHeader
    payload: bytes

    @property
    def digest(self) -> str:
        return digest(self.header, self.payload)

    def facts(self) -> Facts:
        """Return what the checker needs to know of it."""
        spans = [span.version for sample in self.header.samples for span in sample.spans]
        firsts = [sample.spans[0].version for sample in self.header.samples]
        return {
            "group_id": f"{self.header.task_id}/{self.header.incarnation}",
            "lease_id": self.header.lease_id,
            "digest": self.digest,
            "samples": len(self.header.samples),
            "tokens": sum(sample.tokens for sample in self.header.samples),
            "bytes": sum(len(piece) for piece in join_group(self.header, self.payload)),
            "loss_tokens": sum(sample.loss_tokens for sample in self.header.samples),
            "heads": sorted({(version.term, version.version) for version in firsts}),
            "versions": sorted({(version.term, version.version) for version in spans}),
        }

    def message(self) -> groups_pb2.Group:
        return groups_pb2.Group(header=self.header, payload=self.payload)


def digest(header: groups_pb2.GroupHeader, payload: Any) -> str:
    """Digest of all bytes of a group."""
    return hashlib.sha256(header.SerializeToString(deterministic=True) + bytes(payload)).hexdigest()[:20]


def make(
    lease: tasks_pb2.Lease,
    versions: Sequence[Version],
    rng: random.Random,
    *,
    worker_id: str,
    finish: int = groups_pb2.FINISH_REASON_STOP,
) -> Made:
    """A group of the lease's task, whose responses came from these versions one after another."""
    lengths = [PROMPT + len(versions) + rng.choice([1, 5, 30, 30, 200, 2_000]) for _ in range(lease.task.group_size)]
    total = sum(lengths)
    random_arrays = np.random.default_rng(rng.getrandbits(60))
    columns: dict[str, layout.Array] = {
        "token_ids": random_arrays.integers(0, 50_000, total, np.int32),
        "logprobs": -random_arrays.random(total, np.float32),
        "loss_mask": np.ones(total, np.uint8),
    }
    header = groups_pb2.GroupHeader(
        task_id=lease.task.task_id,
        lease_id=lease.lease_id,
        incarnation=lease.incarnation,
        environment=lease.task.environment,
        worker_id=worker_id,
        metadata_json=lease.task.metadata_json,
        samples=[
            groups_pb2.Sample(
                tokens=length,
                prompt_len=PROMPT,
                loss_tokens=length - PROMPT,
                reward=rng.random(),
                finish_reason=finish,  # type: ignore[arg-type]
                spans=_spans(length, sorted(versions)),
            )
            for length in lengths
        ],
        columns=[layout.column_of(name, array, groups_pb2.AXIS_TOKEN) for name, array in columns.items()],
    )
    return Made(header, layout.write_payload(list(columns.values())))


def _spans(length: int, versions: Sequence[Version]) -> list[groups_pb2.VersionSpan]:
    """One token of each version, the rest of the last one."""
    ends = [PROMPT + i + 1 for i in range(len(versions) - 1)] + [length]
    starts = [PROMPT, *ends]
    return [
        groups_pb2.VersionSpan(version=version.wire(), start=start, end=end)
        for version, start, end in zip(versions, starts, ends, strict=False)
    ]


def versions_of(group: groups_pb2.Group) -> list[Version]:
    """The versions of a partial rollout, in order."""
    return sorted({Version.of(span.version) for sample in group.header.samples for span in sample.spans})
