"""The samples of one group while they grow: from a lease with or without a continuation, over any number of engine
calls, to a finished group or to a continuation for somebody else.

Invariants: a sample's spans tile its response tokens, versions not falling; every response token has the
log-probability with which it was drawn; a sample that has a finish reason is never changed again.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from buffer_wire import layout
from buffer_wire.errors import InvalidField
from buffer_wire.validate import check_group
from rollout_buffer.v1 import groups_pb2, tasks_pb2
from rollout_workers.engine.types import FinishReason, GeneratedSample
from rollout_workers.errors import GenerationFailed
from rollout_workers.versions import Version

TokenIds: TypeAlias = npt.NDArray[np.int32]
Logprobs: TypeAlias = npt.NDArray[np.float32]
N = TypeVar("N", np.int32, np.float32, np.uint8)

_WIRE_FINISH = {"stop": groups_pb2.FINISH_REASON_STOP, "length": groups_pb2.FINISH_REASON_LENGTH}
_FINISH: dict[int, FinishReason] = {
    groups_pb2.FINISH_REASON_STOP: "stop",
    groups_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class Span:
    """Response tokens [start, end), counted from the response's first token."""

    version: Version
    start: int
    end: int


@dataclass(slots=True)
class SampleProgress:
    """One response so far."""

    output_ids: TokenIds = field(default_factory=lambda: np.empty(0, np.int32))
    """int32 [t]."""
    logprobs: Logprobs = field(default_factory=lambda: np.empty(0, np.float32))
    """float32 [t]."""
    spans: list[Span] = field(default_factory=list)
    finish: FinishReason | None = None
    """None until it is finished; never "abort"."""

    def __len__(self) -> int:
        return len(self.output_ids)

    def append(self, new: GeneratedSample, version_of: Callable[[str], Version]) -> None:
        """Add what an engine call brought. Raises ValueError for versions that fall."""
        base = len(self)
        spans = list(self.spans)
        for span in new.spans:
            version = version_of(span.version_label)
            if spans and version < spans[-1].version:
                raise ValueError(f"tokens of weights {version} follow tokens of {spans[-1].version}")
            if spans and version == spans[-1].version:
                spans[-1] = Span(version, spans[-1].start, base + span.end)
            else:
                spans.append(Span(version, base + span.start, base + span.end))
        self.spans = spans
        self.output_ids = np.concatenate([self.output_ids, new.output_ids])
        self.logprobs = np.concatenate([self.logprobs, new.logprobs])
        self.finish = None if new.finish_reason == "abort" else new.finish_reason

    def clear(self) -> None:
        """Forget the response, to start it anew."""
        self.output_ids, self.logprobs = np.empty(0, np.int32), np.empty(0, np.float32)
        self.spans, self.finish = [], None


class GroupProgress:
    """The G samples of one lease."""

    def __init__(self, lease: tasks_pb2.Lease, prompt_ids: TokenIds) -> None:
        self.lease = lease
        self.task = lease.task
        self.prompt_ids = prompt_ids
        self.samples = [SampleProgress() for _ in range(lease.task.group_size)]

    @property
    def unfinished(self) -> list[int]:
        """Indexes of the samples that go on."""
        return [i for i, sample in enumerate(self.samples) if sample.finish is None]

    @property
    def tokens(self) -> int:
        """Response tokens so far."""
        return self.tokens_of(range(len(self.samples)))

    def tokens_of(self, indices: Iterable[int]) -> int:
        """Response tokens of these samples so far."""
        return sum(len(self.samples[i]) for i in indices)

    @property
    def newest(self) -> Version | None:
        """The newest version of any token so far."""
        return max((sample.spans[-1].version for sample in self.samples if sample.spans), default=None)

    def take_continuation(self) -> str | None:
        """Start from what the lease's earlier attempt left; returns why it cannot be used, or None.

        Without a usable continuation the samples stay empty: the work is done anew, never wrongly.
        """
        group = self.lease.continuation
        try:
            check_group(group.header, len(group.payload), continuation=True)
            columns = layout.read_payload(group.header, group.payload)
        except (InvalidField, ValueError) as error:
            return str(error)
        wires = group.header.samples
        if len(wires) != len(self.samples):
            return f"it has {len(wires)} samples, the task asks for {len(self.samples)}"
        at, taken = 0, []
        for wire in wires:
            ids = columns[layout.TOKEN_IDS][at : at + wire.tokens].astype(np.int32)
            logprobs = columns[layout.LOGPROBS][at : at + wire.tokens].astype(np.float32)
            at += wire.tokens
            if not np.array_equal(ids[: wire.prompt_len], self.prompt_ids):
                return "its prompt is not the task's"
            taken.append(
                SampleProgress(
                    ids[wire.prompt_len :],
                    logprobs[wire.prompt_len :],
                    [
                        Span(Version.of(span.version), span.start - wire.prompt_len, span.end - wire.prompt_len)
                        for span in wire.spans
                    ],
                    _FINISH.get(wire.finish_reason),
                )
            )
        self.samples = taken
        return None

    def to_group(self, rewards: Sequence[float], worker_id: str) -> tuple[groups_pb2.GroupHeader, bytes]:
        """Header and payload of the finished group. Raises GenerationFailed, InvalidField."""
        for i, sample in enumerate(self.samples):
            if sample.finish is None or not len(sample):
                what = "is not finished" if sample.finish is None else "ended without a token"
                raise GenerationFailed(self.lease.lease_id, f"sample {i} {what}")
        header, payload = self._encode(rewards, worker_id)
        header.metadata_json = self.task.metadata_json
        check_group(header, len(payload))
        return header, payload

    def to_continuation(self, worker_id: str) -> groups_pb2.Group | None:
        """Everything so far, unfinished samples as ABORTED; None when there is not a single token."""
        if not self.tokens:
            return None
        header, payload = self._encode([0.0] * len(self.samples), worker_id)
        return groups_pb2.Group(header=header, payload=payload)

    def _encode(self, rewards: Sequence[float], worker_id: str) -> tuple[groups_pb2.GroupHeader, bytes]:
        prompt = len(self.prompt_ids)
        ids = _interleave(self.prompt_ids, [sample.output_ids for sample in self.samples])
        logprobs = _interleave(np.zeros(prompt, np.float32), [sample.logprobs for sample in self.samples])
        mask = _interleave(np.zeros(prompt, np.uint8), [np.ones(len(sample), np.uint8) for sample in self.samples])
        columns = ((layout.TOKEN_IDS, ids), (layout.LOGPROBS, logprobs), (layout.LOSS_MASK, mask))
        header = groups_pb2.GroupHeader(
            task_id=self.task.task_id,
            generation=self.lease.generation,
            lease_id=self.lease.lease_id,
            environment=self.task.environment,
            samples=[
                groups_pb2.Sample(
                    tokens=prompt + len(sample),
                    prompt_len=prompt,
                    loss_tokens=len(sample),
                    reward=reward,
                    finish_reason=_WIRE_FINISH.get(sample.finish or "", groups_pb2.FINISH_REASON_ABORTED),
                    spans=[
                        groups_pb2.VersionSpan(
                            version=span.version.wire(), start=prompt + span.start, end=prompt + span.end
                        )
                        for span in sample.spans
                    ],
                )
                for sample, reward in zip(self.samples, rewards, strict=True)
            ],
            columns=[layout.column_of(name, array, groups_pb2.AXIS_TOKEN) for name, array in columns],
            worker_id=worker_id,
        )
        return header, layout.write_payload([array for _, array in columns])


def _interleave(prompt: npt.NDArray[N], responses: Sequence[npt.NDArray[N]]) -> npt.NDArray[N]:
    """The prompt before each response: prompt, response 0, prompt, response 1, …."""
    return np.concatenate([part for response in responses for part in (prompt, response)])
