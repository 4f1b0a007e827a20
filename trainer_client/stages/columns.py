"""Columns that a stage adds to a group, on their way to the wire."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from buffer_wire import layout
from buffer_wire.errors import InvalidField
from buffer_wire.validate import check_group
from rollout_buffer.v1 import groups_pb2 as pb
from trainer_client.batch import Group

Arrays = Sequence[layout.Array]
"""One array for each sample of a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """Columns by name, of one group: an array for each of its G samples."""

    tokens: Mapping[str, Arrays] = field(default_factory=dict)
    """Columns per token, each array [T, ...]."""
    samples: Mapping[str, Arrays] = field(default_factory=dict)
    """Columns per sample, each array of the same shape, scalars too."""
    ragged: Mapping[str, Arrays] = field(default_factory=dict)
    """Columns with any number of rows for each sample, each array [rows, ...]."""
    rewards: Sequence[float] | None = None
    """Reward of each sample; required of the stage "rewards", refused of others."""
    version: int = 0
    """Version of what made them, for the trainer to read: a critic's step, for example."""

    def to_wire(self, group: Group, lease_id: str, worker_id: str, *, writes_rewards: bool) -> tuple[bytes, bytes]:
        """Make header and payload for a group. Raises InvalidField for arrays that do not fit it."""
        if (self.rewards is None) == writes_rewards:
            limit = f"one for each of {len(group.samples)} samples" if writes_rewards else "None: no stage but rewards"
            raise InvalidField("rewards", repr(self.rewards), limit)
        header = pb.GroupHeader(
            task_id=group.task_id,
            incarnation=group.incarnation,
            lease_id=lease_id,
            environment=group.environment,
            samples=group.header.samples,
            worker_id=worker_id,
            stage_version=self.version,
        )
        if self.rewards is not None:
            _check_number("rewards", self.rewards, group)
            for sample, reward in zip(header.samples, self.rewards, strict=True):
                sample.reward = float(reward)
        stacked: list[layout.Array] = []
        axes = {pb.AXIS_TOKEN: self.tokens, pb.AXIS_SAMPLE: self.samples, pb.AXIS_RAGGED: self.ragged}
        for axis, columns in axes.items():
            for name, arrays in columns.items():
                stacked.append(_stacked(name, axis, arrays, group))
                rows = [len(array) for array in arrays] if axis == pb.AXIS_RAGGED else ()
                header.columns.append(layout.column_of(name, stacked[-1], axis, rows))
        payload = layout.write_payload(stacked)
        check_group(header, len(payload), of_stage=True)
        return header.SerializeToString(), payload


def _stacked(name: str, axis: int, arrays: Arrays, group: Group) -> layout.Array:
    _check_number(name, arrays, group)
    each = [np.asarray(array) for array in arrays]
    if axis == pb.AXIS_SAMPLE:
        return np.stack(each)
    for i, (array, sample) in enumerate(zip(each, group.samples, strict=True)):
        if axis == pb.AXIS_TOKEN and len(array) != sample.tokens:
            limit = f"{sample.tokens}, the tokens of prompt and response"
            raise InvalidField(f"{name}[{i}]", f"{len(array)} rows", limit)
    return np.concatenate(each)


def _check_number(name: str, values: Sequence[object], group: Group) -> None:
    if len(values) != len(group.samples):
        raise InvalidField(name, f"{len(values)} entries", f"one for each of {len(group.samples)} samples")
