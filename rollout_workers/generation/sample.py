"""Response of one sample while it grows, and its entry in a group's header.

Invariants: spans tile the response tokens, versions not falling; every generated token has the log-probability with
which it was drawn, and mask 1; every token of an environment has log-probability 0, mask 0 and the version of the token
before it; every column that the task asks of the engine has as many tokens as the response; a sample that has a finish
reason is never changed again.

A sample is a trajectory, which may have further rows: contexts of their own, for each of which the above holds.

Turns are noted of samples that a rollout function makes. A note covers a complete turn: what lies behind the last one
is a turn that the engine has not finished. (Samples of a single turn need none.)
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from buffer_wire import layout
from buffer_wire.validate import is_trainable
from rollout_buffer.v1 import groups_pb2
from rollout_workers.engine.token_rows import EngineColumn, PositionRows, joined, none_of
from rollout_workers.engine.types import FinishReason, GeneratedSample
from rollout_workers.generation.columns.given import Columns
from rollout_workers.versions import Version

TokenIds: TypeAlias = npt.NDArray[np.int32]
Logprobs: TypeAlias = npt.NDArray[np.float32]
Mask: TypeAlias = npt.NDArray[np.uint8]
N = TypeVar("N", np.int32, np.float32, np.uint8)

_WIRE_FINISH = {"stop": groups_pb2.FINISH_REASON_STOP, "length": groups_pb2.FINISH_REASON_LENGTH}
_FINISH: dict[int, FinishReason] = {
    groups_pb2.FINISH_REASON_STOP: "stop",
    groups_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class Span:
    """Span of one weight version: response tokens [start, end), counted from the response's first token."""

    version: Version
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TurnNote:
    """Note of one complete turn: response tokens [start, end), counted from the response's first token."""

    role: str
    """Role of the writer: "assistant" where the model wrote, else whatever the environment calls itself."""
    start: int
    end: int
    finish: FinishReason | None = None
    """Finish reason of a turn of the model; None for an environment's."""


@dataclass(slots=True)
class SampleProgress:
    """Response of one sample so far, or of a further row of it."""

    output_ids: TokenIds = field(default_factory=lambda: np.empty(0, np.int32))
    """Token ids of the response, int32 [t]."""
    logprobs: Logprobs = field(default_factory=lambda: np.empty(0, np.float32))
    """Log-probabilities of the response, float32 [t]."""
    spans: list[Span] = field(default_factory=list)
    finish: FinishReason | None = None
    """Finish reason, None until the sample is finished; never "abort"."""
    mask: Mask = field(default_factory=lambda: np.empty(0, np.uint8))
    """Loss mask, uint8 [t]: 1 where the engine generated the token, 0 where it is an environment's."""
    turns: list[TurnNote] = field(default_factory=list)
    prompt_ids: TokenIds | None = None
    """Prompt of this sample's own, int32 [p]; None: the group's."""
    reward: float | None = None
    """Reward that the rollout function returned; None: the reward function is asked."""
    failure: str = ""
    """Name that a function gave to what is wrong with the answer; empty: nothing is."""
    columns: dict[str, EngineColumn] = field(default_factory=dict)
    """Columns that the task asks of the engine, by the names in Task.columns: of t tokens, or of positions."""
    given: Columns = field(default_factory=dict)
    """Columns that the rollout function gave."""
    scored: Columns = field(default_factory=dict)
    """Columns that came with its reward. Like that reward they are in no partial rollout."""
    trainable: bool = True
    """False: the trainer must not train on it."""
    policy: str = ""
    """Name of the policy or role that writes it, where the task has several."""
    rows: "list[SampleProgress]" = field(default_factory=list)
    """Further rows of the trajectory, in the order in which they began; a further row has none."""

    @classmethod
    def empty(cls, asked: Iterable[str]) -> "SampleProgress":
        """A response without a token, of a task that asks the engine for these columns."""
        return cls(columns={name: none_of(name) for name in asked})

    def __len__(self) -> int:
        return len(self.output_ids)

    @property
    def generated(self) -> int:
        """Tokens that came from an engine."""
        return int(np.count_nonzero(self.mask))

    @property
    def trajectory(self) -> "list[SampleProgress]":
        """The sample's rows: itself, and the further ones."""
        return [self, *self.rows]

    def prompt(self, of_group: TokenIds) -> TokenIds:
        """Prompt before this response, int32 [p]: its own, or else the group's."""
        return of_group if self.prompt_ids is None else self.prompt_ids

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
        self.columns = {name: joined(column, new.columns[name]) for name, column in self.columns.items()}
        self._extend(new.output_ids, new.logprobs, np.ones(len(new.output_ids), np.uint8))
        self.finish = None if new.finish_reason == "abort" else new.finish_reason

    def interject(self, ids: TokenIds) -> None:
        """Add an environment's tokens, int32 [n]. There must be generated ones before them."""
        last = self.spans[-1]
        self.spans[-1] = Span(last.version, last.start, last.end + len(ids))
        self.columns = {name: column.and_none(len(ids)) for name, column in self.columns.items()}
        self._extend(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.uint8))

    def _extend(self, ids: TokenIds, logprobs: Logprobs, mask: Mask) -> None:
        self.output_ids = _behind(self.output_ids, ids)
        self.logprobs = _behind(self.logprobs, logprobs)
        self.mask = _behind(self.mask, mask)

    @property
    def positions_known(self) -> int:
        """Positions of prompt and response, from the first on, for which there are rows of routed experts."""
        return next((column.end for column in self.columns.values() if isinstance(column, PositionRows)), 0)

    def note_turn(self, role: str, finish: FinishReason | None = None) -> TurnNote:
        """Note that the tokens behind the last noted turn are a complete one."""
        note = TurnNote(role, self.noted, len(self), finish)
        self.turns.append(note)
        return note

    @property
    def noted(self) -> int:
        """Tokens that belong to complete turns."""
        return self.turns[-1].end if self.turns else 0

    def cut(self, turns: int, prompt: int) -> None:
        """Forget what is behind the first `turns` turns, at least one, the last of them the model's. `prompt`: tokens
        of the prompt.
        """
        self.turns = self.turns[:turns]
        end = self.noted
        self.output_ids, self.logprobs, self.mask = self.output_ids[:end], self.logprobs[:end], self.mask[:end]
        self.columns = {name: column.first(end, prompt=prompt) for name, column in self.columns.items()}
        self.spans = [Span(span.version, span.start, min(span.end, end)) for span in self.spans if span.start < end]

    def clear(self) -> None:
        """Forget the response, to start it anew; further rows stay."""
        anew = replace(SampleProgress.empty(self.columns), rows=self.rows)
        for each in fields(self):
            setattr(self, each.name, getattr(anew, each.name))

    def for_trainer(self) -> "SampleProgress":
        """The row as the trainer gets it: what is not trainable has neither mask nor log-probabilities."""
        if self.trainable:
            return self
        return replace(self, mask=np.zeros_like(self.mask), logprobs=np.zeros_like(self.logprobs))


def add_sample(header: groups_pb2.GroupHeader, sample: SampleProgress, prompt: int, reward: float) -> groups_pb2.Sample:
    """Add the entry of a sample, with so many tokens of prompt, to a header."""
    # Messages made in their place take a third of the time of those made and copied there; fields set one by one take
    # less than keywords.
    wire = header.samples.add()
    wire.tokens = prompt + len(sample)
    wire.prompt_len = prompt
    wire.loss_tokens = sample.generated
    wire.reward = reward
    wire.finish_reason = _WIRE_FINISH.get(sample.finish or "", groups_pb2.FINISH_REASON_ABORTED)
    for span in sample.spans:
        made = wire.spans.add()
        made.start, made.end = prompt + span.start, prompt + span.end
        stamp = made.version
        stamp.term, stamp.version = span.version.term, span.version.version
    for note in sample.turns:
        wire.turns.add(role=note.role, start=prompt + note.start, end=prompt + note.end)
    if not sample.trainable:
        wire.trainable = False
    if sample.policy:
        wire.policy = sample.policy
    if sample.failure:
        wire.failure = sample.failure
    return wire


def sample_of(wire: groups_pb2.Sample, columns: Mapping[str, layout.Array], at: int) -> SampleProgress:
    """A sample of a partial rollout, whose first token is `at` in the columns. Those of turns, of the engine and of
    functions are not read.
    """
    response = slice(at + wire.prompt_len, at + wire.tokens)
    return SampleProgress(
        output_ids=columns[layout.TOKEN_IDS][response].astype(np.int32),
        logprobs=columns[layout.LOGPROBS][response].astype(np.float32),
        mask=columns[layout.LOSS_MASK][response].astype(np.uint8),
        spans=[
            Span(Version.of(span.version), span.start - wire.prompt_len, span.end - wire.prompt_len)
            for span in wire.spans
        ],
        finish=_FINISH.get(wire.finish_reason),
        trainable=is_trainable(wire),
        policy=wire.policy,
        failure=wire.failure,
    )


def _behind(first: npt.NDArray[N], second: npt.NDArray[N]) -> npt.NDArray[N]:
    """Both, one behind the other. What most responses begin with is nothing, and then nothing is copied."""
    return np.concatenate([first, second]) if len(first) else second
