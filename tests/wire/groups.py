"""Valid groups for the tests of the wire, to be broken one field at a time."""

from collections.abc import Mapping, Sequence

import numpy as np

from buffer_wire import layout
from rollout_buffer.v1 import common_pb2
from rollout_buffer.v1 import groups_pb2 as pb


def make_header(
    lengths: Sequence[int], *, extra: Mapping[str, layout.Array] | None = None
) -> tuple[pb.GroupHeader, list[layout.Array]]:
    """Header and columns of a group with samples of these many tokens, the first of each being the prompt."""
    total = sum(lengths)
    samples = [
        pb.Sample(
            tokens=n,
            prompt_len=min(1, n - 1),
            loss_tokens=n - min(1, n - 1),
            reward=1.0,
            finish_reason=pb.FINISH_REASON_STOP,
            spans=[pb.VersionSpan(version=common_pb2.WeightVersion(term=1, version=2), start=min(1, n - 1), end=n)],
        )
        for n in lengths
    ]
    columns: dict[str, layout.Array] = {
        "token_ids": np.arange(total, dtype=np.int32),
        "logprobs": -np.linspace(0.0, 1.0, total, dtype=np.float32),
        "loss_mask": np.ones(total, np.uint8),
        **(extra or {}),
    }
    header = pb.GroupHeader(task_id="task-1", environment="sums", samples=samples, worker_id="w")
    for name, array in columns.items():
        header.columns.append(layout.column_of(name, array, pb.AXIS_TOKEN))
    return header, list(columns.values())
