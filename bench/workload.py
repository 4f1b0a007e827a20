"""The groups that every side of the benchmark moves: 8 samples each, sized so that a group is 20 KB, 147 KB or 1.2 MB.

A token takes 9 bytes (int32 id, float32 log-probability, uint8 mask), so 20 KB is 8 x 278 tokens.
"""

from dataclasses import dataclass

import numpy as np

from buffer_wire import layout
from rollout_buffer.v1 import common_pb2
from rollout_buffer.v1 import groups_pb2 as pb

SAMPLES = 8
_BYTES_PER_TOKEN = 9


@dataclass(frozen=True, slots=True)
class Size:
    """One size of groups, and how many are moved in a run."""

    name: str
    group_bytes: int
    groups: int
    """Groups of one run; a multiple of `batch_groups`."""
    batch_groups: int

    @property
    def tokens(self) -> int:
        """Tokens of one sample."""
        return self.group_bytes // (SAMPLES * _BYTES_PER_TOKEN)

    @property
    def bundle(self) -> int:
        """Groups of a push message of about 1 MB."""
        return max(1, 1_000_000 // self.group_bytes)


def sizes(*, quick: bool) -> list[Size]:
    """The three sizes; `quick` moves a quarter of the groups."""
    part = 4 if quick else 1
    return [
        Size("20kb", 20_000, 12_800 // part, 128),
        Size("147kb", 147_000, 2_560 // part, 32),
        Size("1200kb", 1_200_000, 384 // part, 32),
    ]


def arrays(size: Size) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """token_ids int32, logprobs float32, loss_mask uint8 of a whole group, each [8 x tokens]."""
    rng = np.random.default_rng(0)
    n = SAMPLES * size.tokens
    return (
        rng.integers(0, 150_000, n, np.int32),
        -rng.random(n, np.float32),
        np.ones(n, np.uint8),
    )


def header(size: Size, task_id: str, version: int) -> pb.GroupHeader:
    """The header of such a group, all of it from one weight version."""
    tokens, prompt = size.tokens, min(64, size.tokens // 4)
    span = pb.VersionSpan(version=common_pb2.WeightVersion(term=1, version=version), start=prompt, end=tokens)
    sample = pb.Sample(
        tokens=tokens,
        prompt_len=prompt,
        loss_tokens=tokens - prompt,
        reward=1.0,
        finish_reason=pb.FINISH_REASON_STOP,
        spans=[span],
    )
    columns = [
        pb.Column(name=name, dtype=dtype, axis=pb.AXIS_TOKEN)  # type: ignore[arg-type]
        for name, dtype in layout.REQUIRED_COLUMNS
    ]
    return pb.GroupHeader(
        task_id=task_id, environment="bench", samples=[sample] * SAMPLES, columns=columns, worker_id="bench"
    )
