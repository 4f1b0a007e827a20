"""Shard that one rank gets of a step, or of one of its micro-batches, as numpy arrays over the received messages.

Invariants: every array is a read-only view, nothing is copied. So what was received in one piece stays in memory
exactly as long as something refers to one of its arrays. A piece is a message of 1 MB, or up to 8 MiB read from the
store. Columns read from the store are aligned; relayed ones may not be, which numpy handles. The first axis of a
sample's per-token array is T, the tokens of prompt and response.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from buffer_wire import layout
from buffer_wire.codec import Buffer, Delivered, split_group
from buffer_wire.enums import words
from buffer_wire.errors import InvalidField
from buffer_wire.messages import value_of
from buffer_wire.validate import has_rows, is_trainable
from rollout_buffer.v1 import groups_pb2 as pb
from trainer_client.state import WeightVersion
from trainer_client.tasks import ImageRef

REWARDS = "rewards"
"""Name of the stage that writes rewards."""
_REQUIRED = (layout.TOKEN_IDS, layout.LOGPROBS, layout.LOSS_MASK)
_FINISH = {number: word for word, number in words(pb.FinishReason).items()}


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """Facts of a step: sizes, versions, staleness. Totals are sums over all ranks and over the step's micro-batches so
    far.

    Where `final` is set, they are the step's own. A token-mean loss over any sharding and any micro-batches then equals
    the single-process one.
    """

    step: int
    train_version: int
    total_groups: int
    total_samples: int
    total_tokens: int
    total_loss_tokens: int
    shard_groups: int
    """Groups of this rank's shard."""
    shard_tokens: int
    staleness_mean: float
    """Mean over the step's groups of train_version − head_version."""
    staleness_max: int
    replayed: bool
    """True when this pull repeats an earlier assembly of the step."""
    queued_groups: int
    """Groups queued after the assembly."""
    waited_s: float
    """Duration of this pull, from its call to its last byte."""
    micro_batch: int = 0
    """Number of the micro-batch, from 0; the last one where several were gathered into a whole batch."""
    final: bool = True
    """True for the step's last micro-batch, and for whole batches, unless the step lacks groups for rejected ones."""
    committed_steps: int = 0
    """Number of steps committed, as the service said to a pull that committed; else 0."""
    checkpointed_steps: int = 0
    """Number of steps whose replay data is freed, as the service said to a pull that checkpointed; else 0."""
    total_trajectories: int = 0
    """Trajectories with a row that is trainable; 0 from a service that does not count them."""
    reused_groups: int = 0
    """Groups of these that earlier steps have trained on (policy max_uses); they come with micro-batch 0."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Span: the tokens [start, end) of a sample, which were generated under `version`."""

    version: WeightVersion
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Turn:
    """Turn of a conversation: the tokens [start, end) of a sample, written by `role`."""

    role: str
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Sample:
    """Sample: one response with its prompt, as arrays over its T tokens. Or one row of a trajectory of several."""

    token_ids: npt.NDArray[np.int32]
    """Token ids of prompt and response, int32 [T]."""
    logprobs: npt.NDArray[np.float32]
    """Log-probabilities under the policy that generated each token, float32 [T]; entry t belongs to token t. 0 where
    the mask is 0."""
    loss_mask: npt.NDArray[np.uint8]
    """Loss mask, uint8 [T]: 1 where the token counts in the loss."""
    prompt_len: int
    loss_tokens: int
    """Number of loss tokens: ones in loss_mask."""
    reward: float
    finish_reason: str
    """Reason for the sample's end: "stop" or "length"."""
    spans: tuple[VersionSpan, ...]
    """Spans by weight version, in order; they tile [prompt_len, T)."""
    turns: tuple[Turn, ...]
    extras: Mapping[str, layout.Array]
    """Further columns by name: [T, …] per token, […] per sample, [rows, …] ragged. bfloat16 comes as its bits in
    uint16."""
    tail_version: int = field(repr=False)
    """Tail version of the sample's group, to which versions of an abandoned timeline are cut."""
    trajectory: int = 0
    """Index of the sample's trajectory in its group, from 0. Samples of the same one are rows of it."""
    trainable: bool = True
    """False where the sample must not be trained on; its mask is 0 then."""
    policy: str = ""
    """Name of the policy or role that wrote it, where the task has several."""
    failure: str = ""
    """Name that the rollout or reward function gave to what is wrong with the answer; empty: nothing is."""

    @property
    def tokens(self) -> int:
        """Number of tokens T, prompt and response."""
        return len(self.token_ids)

    def __getstate__(self) -> dict[str, object]:
        """Copy the arrays for pickling: another process cannot share the received message."""
        kept = {name: value for name, value in self.__dict__.items() if name != "versions"}
        return {**kept, "extras": dict(self.extras)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, extras=MappingProxyType(state["extras"]))

    @cached_property
    def versions(self) -> npt.NDArray[np.int64]:
        """Weight version that generated each token, int64 [T]; −1 for the prompt.

        A resume abandons a timeline. A version of an abandoned timeline counts no more than what was published after
        it, and no more than the group's tail version.
        """
        out = np.empty(len(self.token_ids), np.int64)
        self.write_versions(out)
        out.flags.writeable = False
        return out

    def write_versions(self, out: npt.NDArray[np.generic]) -> None:
        """Write `versions` into `out`, int [T]."""
        out[:] = -1
        most = self.tail_version
        for span in reversed(self.spans):
            most = min(most, span.version.version)
            out[span.start : span.end] = most


@dataclass(frozen=True, slots=True)
class StageColumns:
    """Columns that a stage has added to a group: header and payload as its worker pushed them."""

    stage: str
    header: pb.GroupHeader
    payload: memoryview = field(repr=False)

    @property
    def version(self) -> int:
        """Version of what made them, as the stage's worker said it; 0: it said none."""
        return self.header.stage_version

    @classmethod
    def of(cls, delivered: Delivered) -> "StageColumns":
        """Split what was delivered for a stage. Raises MalformedMessage, DecodeError."""
        header, payload = split_group(memoryview(delivered.body))
        return cls(delivered.stage, pb.GroupHeader.FromString(bytes(header)), payload)

    def __getstate__(self) -> tuple[str, pb.GroupHeader, bytes]:
        return self.stage, self.header, bytes(self.payload)

    def __setstate__(self, state: tuple[str, pb.GroupHeader, bytes]) -> None:
        for name, value in zip(self.__slots__, (*state[:2], memoryview(state[2])), strict=True):
            object.__setattr__(self, name, value)


@dataclass(frozen=True, eq=False)
class Group:
    """Group: the samples of one task, generated once. What is in it is parsed at first use."""

    header_bytes: Buffer = field(repr=False)
    """Header of the group, serialized, inside the received message."""
    payload: memoryview = field(repr=False)
    """Payload: the bytes of the columns, inside the received message."""
    sequence: int
    """Position of the group among those that the run accepted."""
    head_version: int
    """Smallest version of any sample's first token, in the present timeline."""
    tail_version: int
    """Largest version of any sample's last token, in the present timeline."""
    train_version: int
    """Weight version that trains on the group."""
    stages: Sequence[StageColumns] = ()
    """Columns that stages have added, in their order; the group's header, columns, samples and rewards have them."""
    prior_uses: int = 0
    """Number of steps that have trained on the group before this one (policy max_uses); 0: it is new."""

    @classmethod
    def of(cls, delivered: Delivered, train_version: int, stages: Sequence[Delivered] = ()) -> "Group":
        """Split a delivered group, with what stages have added, into headers and payloads. Raises MalformedMessage."""
        parts = split_group(memoryview(delivered.body))
        versions = delivered.head_version, delivered.tail_version, train_version
        return cls(*parts, delivered.sequence, *versions, tuple(map(StageColumns.of, stages)), delivered.prior_uses)

    def __getstate__(self) -> dict[str, object]:
        """Copy header and payload out of the message for pickling; parsed values are left out."""
        kept = {name: self.__dict__[name] for name in self.__dataclass_fields__}
        return {**kept, "header_bytes": bytes(self.header_bytes), "payload": bytes(self.payload)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, payload=memoryview(state["payload"]))

    @cached_property
    def header(self) -> pb.GroupHeader:
        """Header of the group, as the worker wrote it, with the columns and rewards of stages. Raises DecodeError."""
        header = pb.GroupHeader.FromString(bytes(self.header_bytes))
        for added in self.stages:
            _join(header, added)
        return header

    @property
    def task_id(self) -> str:
        """Id of the task that the group answers."""
        return self.header.task_id

    @property
    def incarnation(self) -> int:
        """Incarnation of the task: the number of times that it was started anew from nothing."""
        return self.header.incarnation

    @property
    def group_id(self) -> str:
        """Id of the group: task_id/incarnation."""
        return f"{self.task_id}/{self.incarnation}"

    @property
    def environment(self) -> str:
        """Name of the task's environment."""
        return self.header.environment

    @property
    def worker_id(self) -> str:
        """Id of the worker that pushed the group."""
        return self.header.worker_id

    @property
    def staleness(self) -> int:
        """Staleness in versions: train_version − head_version, at least 0."""
        return max(0, self.train_version - self.head_version)

    @cached_property
    def images(self) -> "tuple[ImageRef, ...]":
        """Images of the prompt that every sample begins with, each with the SHA-256 of what the engine saw."""
        return tuple(value_of(ImageRef, image) for image in self.header.images)

    @cached_property
    def metadata(self) -> Mapping[str, object]:
        """Metadata of the task, parsed from JSON at first use."""
        return MappingProxyType(json.loads(self.header.metadata_json) if self.header.metadata_json else {})

    @cached_property
    def columns(self) -> Mapping[str, layout.Array]:
        """Columns by name, each [rows, …] over all samples of the group, one after another.

        Raises ValueError when a payload's length contradicts its header.
        """
        if not self.stages:
            return MappingProxyType(layout.read_payload(self.header, self.payload))
        columns = layout.read_payload(pb.GroupHeader.FromString(bytes(self.header_bytes)), self.payload)
        for added in self.stages:
            columns |= layout.read_payload(added.header, added.payload)
        return MappingProxyType(columns)

    @cached_property
    def has_rows(self) -> bool:
        """True unless each sample is a trajectory of its own, trainable, and of the policy in training."""
        return has_rows(self.header.samples)

    def refuse_rows(self, who: str) -> None:
        """Raise InvalidField where the group has rows of trajectories, which `who` would take for samples."""
        if self.has_rows:
            what = f"of task {self.task_id!r}, are rows of trajectories"
            raise InvalidField("samples", what, f"samples that are a trajectory each: {who}")

    def refuse_images(self, why: str) -> None:
        """Raise InvalidField if the group has images."""
        if self.images:
            raise InvalidField(f"images of group {self.task_id}", f"{len(self.images)} images", f"none: {why}")

    @cached_property
    def rewards(self) -> npt.NDArray[np.float32]:
        """Reward of each sample, float32 [G]."""
        return np.array([sample.reward for sample in self.header.samples], np.float32)

    @cached_property
    def samples(self) -> tuple[Sample, ...]:
        """Samples of the group, G of them; their arrays are slices of `columns`."""
        header, columns = self.header, self.columns
        # A slice of repeated fields is a list, and takes half the time of an iteration.
        wires = header.samples[:]
        ends = list(accumulate([sample.tokens for sample in wires], initial=0))
        token_ids, logprobs, loss_mask = (columns[name] for name in _REQUIRED)
        extras = [
            (column.name, columns[column.name], list(accumulate(layout.column_rows(header, column), initial=0)))
            for column in header.columns[len(_REQUIRED) :]
        ]
        per_sample = {column.name for column in header.columns if column.axis == pb.AXIS_SAMPLE}
        # One object for each version, for nearly all samples have the same.
        made: dict[tuple[int, int], WeightVersion] = {}
        samples = []
        for i, sample in enumerate(wires):
            rows, turns = slice(ends[i], ends[i + 1]), sample.turns
            own = {name: each[i] if name in per_sample else each[at[i] : at[i + 1]] for name, each, at in extras}
            samples.append(
                Sample(
                    token_ids=token_ids[rows],  # type: ignore[arg-type]
                    logprobs=logprobs[rows],  # type: ignore[arg-type]
                    loss_mask=loss_mask[rows],  # type: ignore[arg-type]
                    prompt_len=sample.prompt_len,
                    loss_tokens=sample.loss_tokens,
                    reward=sample.reward,
                    finish_reason=_FINISH.get(sample.finish_reason, "unspecified"),
                    spans=tuple([_span(span, made) for span in sample.spans[:]]),
                    turns=tuple([Turn(turn.role, turn.start, turn.end) for turn in turns]) if turns else (),
                    extras=MappingProxyType(own),
                    tail_version=self.tail_version,
                    trajectory=sample.trajectory - 1 if sample.trajectory else i,
                    trainable=is_trainable(sample),
                    policy=sample.policy,
                    failure=sample.failure,
                )
            )
        return tuple(samples)


def _join(header: pb.GroupHeader, added: StageColumns) -> None:
    """Add the columns of a stage to a header; of two with one name the later one counts. Raises ValueError."""
    if [sample.tokens for sample in added.header.samples] != [sample.tokens for sample in header.samples]:
        raise ValueError(f"stage {added.stage} has added columns of other samples to task {header.task_id!r}")
    names = {column.name for column in added.header.columns}
    kept = [column for column in header.columns if column.name not in names]
    del header.columns[:]
    header.columns.extend([*kept, *added.header.columns])
    if added.stage == REWARDS:
        for sample, scored in zip(header.samples, added.header.samples, strict=True):
            sample.reward = scored.reward


def _span(span: pb.VersionSpan, made: dict[tuple[int, int], WeightVersion]) -> VersionSpan:
    stamp = span.version
    key = (stamp.term, stamp.version)
    version = made.get(key) or made.setdefault(key, WeightVersion(*key))
    return VersionSpan(version, span.start, span.end)


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """Batch, as one rank gets it: its shard of a step, or of one micro-batch of the step."""

    info: BatchInfo
    groups: Sequence[Group]
    """Groups of the shard, in the step's order."""
    received_bytes: int
    """Size in bytes of what was received for it: the messages of the pull, and the groups read from the store."""

    @property
    def step(self) -> int:
        """Number of the step, from 0."""
        return self.info.step

    @property
    def micro_batch(self) -> int:
        """Number of the micro-batch within the step, from 0."""
        return self.info.micro_batch

    @property
    def final(self) -> bool:
        """True when no further micro-batch of the step comes: the totals are the step's own."""
        return self.info.final

    @property
    def samples(self) -> Iterator[Sample]:
        """Yield all samples of the shard, group after group."""
        for group in self.groups:
            yield from group.samples
