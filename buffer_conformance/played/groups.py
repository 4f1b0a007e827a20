"""Valid groups of made-up tokens, for the workers that the kit plays."""

import zlib

import numpy as np

from buffer_wire.layout import LOGPROBS, LOSS_MASK, TOKEN_IDS, Array, column_of, write_payload
from rollout_buffer.v1 import common_pb2, groups_pb2, tasks_pb2

_RESPONSE = 6


def made_group(lease: tasks_pb2.Lease, version: common_pb2.WeightVersion) -> groups_pb2.Group:
    """The group of a lease, all of one version; the same lease gives the same tokens. Rewards are 0 and 1 in turn."""
    task, rng = lease.task, np.random.default_rng(zlib.crc32(lease.lease_id.encode()))
    prompt = np.array(task.prompt_token_ids or [1], np.int32)
    tokens, prompt_len = len(prompt) + _RESPONSE, len(prompt)
    mask = np.zeros(tokens, np.uint8)
    mask[prompt_len:] = 1
    ids = [np.concatenate([prompt, rng.integers(1, 100, _RESPONSE, np.int32)]) for _ in range(task.group_size)]
    columns: dict[str, Array] = {
        TOKEN_IDS: np.concatenate(ids),
        LOGPROBS: np.concatenate([-rng.random(tokens, np.float32) * mask for _ in ids]).astype(np.float32),
        LOSS_MASK: np.concatenate([mask for _ in ids]),
    }
    sample = groups_pb2.Sample(
        tokens=tokens,
        prompt_len=prompt_len,
        loss_tokens=_RESPONSE,
        finish_reason=groups_pb2.FINISH_REASON_LENGTH,
        spans=[groups_pb2.VersionSpan(version=version, start=prompt_len, end=tokens)],
    )
    header = groups_pb2.GroupHeader(
        task_id=task.task_id,
        incarnation=lease.incarnation,
        lease_id=lease.lease_id,
        environment=task.environment,
        samples=[sample] * task.group_size,
        columns=[column_of(name, array, groups_pb2.AXIS_TOKEN) for name, array in columns.items()],
        metadata_json=task.metadata_json,
        worker_id="conformance",
    )
    for i, made in enumerate(header.samples):
        made.reward = i % 2
    return groups_pb2.Group(header=header, payload=write_payload(list(columns.values())))
