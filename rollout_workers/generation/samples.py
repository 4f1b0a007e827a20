"""Samples of one group while they grow, over any number of engine calls.

They begin with a lease, with or without a partial rollout, and end as a finished group or as a partial rollout for
another worker.

Invariants: a sample's spans tile its response tokens, versions not falling; every generated token has the
log-probability with which it was drawn, and mask 1; every token of an environment has log-probability 0, mask 0 and the
version of the token before it; every column that the task asks of the engine has as many tokens as the response; a
sample that has a finish reason is never changed again; generated tokens that leave a group are counted: `received` +
`resumed` = those of the samples + the sum of `discarded`.

A sample is a trajectory, which may have further rows: contexts of their own, for each of which the above holds.

Turns are noted of samples that a rollout function makes. A note covers a complete turn: what lies behind the last one
is a turn that the engine has not finished. (Samples of a single turn need none.)
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from buffer_wire import layout
from buffer_wire.engine_columns import ROUTED_EXPERTS
from buffer_wire.errors import InvalidField
from buffer_wire.limits import MAX_MESSAGE_BYTES, MAX_SAMPLES
from buffer_wire.messages import message_of
from buffer_wire.validate import check_group, is_trainable
from rollout_buffer.v1 import groups_pb2, tasks_pb2
from rollout_workers.engine.token_rows import EngineColumn, PositionRows, joined, none_of
from rollout_workers.engine.types import FinishReason, GeneratedSample, PromptImage, SampleRequest
from rollout_workers.errors import GenerationFailed
from rollout_workers.generation.columns import columns_of, of_partial
from rollout_workers.generation.given import (
    FINISH_COLUMN,
    REWARD_COLUMN,
    Columns,
    both,
    check_alike,
    given_of_wire,
    given_to_wire,
    of_trajectory,
)
from rollout_workers.versions import Version

TokenIds: TypeAlias = npt.NDArray[np.int32]
Logprobs: TypeAlias = npt.NDArray[np.float32]
Mask: TypeAlias = npt.NDArray[np.uint8]
ROW_STRIDE = 1 << 16
"""Distance of indexes of the rows of a sample: those of sample i are i, i + ROW_STRIDE, i + 2 · ROW_STRIDE, …."""
MOST_PARTIAL_BYTES = MAX_MESSAGE_BYTES - (2 << 20)
"""Largest payload of a partial rollout that is handed back whole, in bytes: it travels in one message."""
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


_TURN_FINISHES: tuple[FinishReason | None, ...] = (None, "stop", "length")


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

    def __len__(self) -> int:
        return len(self.output_ids)

    @property
    def generated(self) -> int:
        """Tokens that came from an engine."""
        return int(np.count_nonzero(self.mask))

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
        self.output_ids = _behind(self.output_ids, new.output_ids)
        self.logprobs = _behind(self.logprobs, new.logprobs)
        self.mask = _behind(self.mask, np.ones(len(new.output_ids), np.uint8))
        self.finish = None if new.finish_reason == "abort" else new.finish_reason

    def interject(self, ids: TokenIds) -> None:
        """Add an environment's tokens, int32 [n]. There must be generated ones before them."""
        last = self.spans[-1]
        self.spans[-1] = Span(last.version, last.start, last.end + len(ids))
        self.output_ids = np.concatenate([self.output_ids, ids])
        self.logprobs = np.concatenate([self.logprobs, np.zeros(len(ids), np.float32)])
        self.mask = np.concatenate([self.mask, np.zeros(len(ids), np.uint8)])
        self.columns = {name: column.and_none(len(ids)) for name, column in self.columns.items()}

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
        """Forget the response, to start it anew."""
        self.output_ids, self.logprobs = np.empty(0, np.int32), np.empty(0, np.float32)
        self.mask = np.empty(0, np.uint8)
        self.columns = {name: none_of(name) for name in self.columns}
        self.spans, self.turns, self.finish, self.prompt_ids, self.reward = [], [], None, None, None
        self.given, self.scored = {}, {}
        self.trainable, self.policy, self.failure = True, "", ""


class GroupProgress:
    """The G samples of one lease. `surplus`: so many more begin, and the first G that end make the group."""

    def __init__(
        self,
        lease: tasks_pb2.Lease,
        prompt_ids: TokenIds,
        *,
        images: Sequence[PromptImage] = (),
        surplus: int = 0,
    ) -> None:
        self.lease = lease
        self.task = lease.task
        self.prompt_ids = prompt_ids
        self.images = tuple(images)
        """Images of the prompt, which that of every sample begins with."""
        asked = list(lease.task.columns)
        self.samples = [
            SampleProgress(columns={name: none_of(name) for name in asked})
            for _ in range(lease.task.group_size + surplus)
        ]
        self.cached = 0
        """Input tokens that engines took from their prefix caches."""
        self.received = 0
        """Tokens that engines generated under this lease."""
        self.resumed = 0
        """Generated tokens of the partial rollout that was taken."""
        self.discarded: Counter[str] = Counter()
        """Generated tokens that were thrown away, by reason."""

    @property
    def unfinished(self) -> list[int]:
        """Indexes of the samples that go on."""
        return [i for i, sample in enumerate(self.samples) if sample.finish is None]

    @property
    def surplus(self) -> int:
        """Samples beyond the group's size."""
        return len(self.samples) - self.task.group_size

    @property
    def is_complete(self) -> bool:
        """True when as many samples are finished as make the group."""
        return len(self.samples) - len(self.unfinished) >= self.task.group_size

    def cut_surplus(self) -> tuple[list[int], int]:
        """Forget the samples beyond the group's size: first of those that are unfinished, the shortest first.

        Returns the indexes that those had which are kept, and the generated tokens of the others, which count as
        discarded.
        """
        if not self.surplus:
            return list(range(len(self.samples))), 0
        going_on = sorted(self.unfinished, key=lambda i: -len(self.samples[i]))
        finished = [i for i, sample in enumerate(self.samples) if sample.finish is not None]
        kept = sorted([*finished, *going_on][: self.task.group_size])
        before, self.samples = self.generated, [self.samples[i] for i in kept]
        if lost := before - self.generated:
            self.discarded["surplus"] += lost
        return kept, lost

    @property
    def tokens(self) -> int:
        """Response tokens so far."""
        return sum(len(row) for row in self._rows)

    def tokens_of(self, indices: Iterable[int]) -> int:
        """Response tokens of these samples so far."""
        return sum(len(self.row(i)) for i in indices)

    @property
    def generated(self) -> int:
        """Tokens of the samples that came from engines."""
        return sum(row.generated for row in self._rows)

    @property
    def _rows(self) -> list[SampleProgress]:
        """Every row: each sample, and its further ones behind it."""
        return [row for sample in self.samples for row in (sample, *sample.rows)]

    def row(self, index: int) -> SampleProgress:
        """A row by its index: that of a sample is its place in the group, and of the next ones ROW_STRIDE more each."""
        number, sample = divmod(index, ROW_STRIDE)
        return self.samples[sample].rows[number - 1] if number else self.samples[sample]

    def begin_row(self, sample: int, number: int) -> int:
        """Begin a sample's further row of this number, from 1, unless it is there; returns its index. Number 0 is the
        sample itself. Raises InvalidField.
        """
        rows = self.samples[sample].rows
        if number > len(rows):
            if len(self._rows) >= MAX_SAMPLES:
                raise InvalidField("rows", f"more than {MAX_SAMPLES} in the group", f"at most {MAX_SAMPLES}")
            rows.append(SampleProgress(columns={name: none_of(name) for name in self.task.columns}))
        return sample + number * ROW_STRIDE

    def keep_rows(self, sample: int, kept: Sequence[SampleProgress]) -> None:
        """Keep these further rows of a sample; what others have, which nobody has begun again, is discarded."""
        left = [row for row in self.samples[sample].rows if not any(row is one for one in kept)]
        if lost := sum(row.generated for row in left):
            self.discarded["not_repeated"] += lost
        self.samples[sample].rows = list(kept)

    def prompt_of(self, index: int) -> TokenIds:
        """Prompt of this row, int32 [p]."""
        return self._prompt(self.row(index))

    def _prompt(self, row: SampleProgress) -> TokenIds:
        return self.prompt_ids if row.prompt_ids is None else row.prompt_ids

    def with_images(self, request: SampleRequest) -> SampleRequest:
        """A request with the group's images. Raises InvalidField where they are not in its prompt."""
        end = self.images[-1].start + self.images[-1].tokens
        if not np.array_equal(request.input_ids[:end], self.prompt_ids[:end]):
            raise InvalidField("images", f"sample {request.sample_index}", "a prompt that begins as the task's does")
        return replace(request, images=self.images)

    def odd_tokens(self, new: GeneratedSample) -> str:
        """Reason why what was generated cannot be gone on with or trained: it holds a placeholder of images."""
        places = {int(self.prompt_ids[image.start]) for image in self.images}
        found = places.intersection(new.output_ids.tolist()) if places else ()
        return f"it holds the placeholder of images {min(found)}, though no image" if found else ""

    def take_back(self, index: int, turns: int, reason: str) -> None:
        """Forget a response behind its first `turns` turns; its generated tokens count as discarded for `reason`."""
        row = self.row(index)
        if not turns:
            self.clear_row(index, reason)
            return
        before = row.generated
        row.cut(turns, len(self._prompt(row)))
        if lost := before - row.generated:
            self.discarded[reason] += lost

    def start_anew(self, index: int, reason: str) -> None:
        """Forget a sample with all its rows; their generated tokens count as discarded for `reason`."""
        sample = self.samples[index]
        for number in range(len(sample.rows) + 1):
            self.clear_row(index + number * ROW_STRIDE, reason)
        sample.rows = []

    def clear_row(self, index: int, reason: str) -> None:
        """Forget a row's response; its generated tokens count as discarded for `reason`."""
        row = self.row(index)
        if lost := row.generated:
            self.discarded[reason] += lost
        row.clear()

    def give(self, index: int, columns: Columns) -> None:
        """Keep what the rollout function gave with a row. Raises InvalidField if finished samples, or the sample that
        it is a row of, have other columns.
        """
        sample = index % ROW_STRIDE
        others = {i: each.given for i, each in enumerate(self.samples) if each.finish is not None or i == sample}
        others.pop(index, None)
        check_alike({**others, index: columns})
        self.row(index).given = columns

    def newest_of(self, indices: Iterable[int]) -> Version | None:
        """The newest version of any token of these samples so far."""
        rows = [row for i in indices for row in (self.row(i), *self.row(i).rows)]
        return max((row.spans[-1].version for row in rows if row.spans), default=None)

    @property
    def oldest(self) -> Version | None:
        """Version with which the group was begun: the smallest of a first token."""
        return min((sample.spans[0].version for sample in self.samples if sample.spans), default=None)

    def take_partial_rollout(self) -> str | None:
        """Start from what the lease's earlier attempt left; returns why it cannot be used, or None.

        Without a usable partial rollout the samples stay empty: the work is done anew, never wrongly.
        """
        group = self.lease.partial_rollout
        try:
            check_group(group.header, len(group.payload), partial_rollout=True)
            columns = layout.read_payload(group.header, group.payload)
        except (InvalidField, ValueError) as error:
            return str(error)
        wires = group.header.samples
        if (found := wires[-1].trajectory or len(wires)) != len(self.samples):
            return f"it has {found} samples, the task asks for {len(self.samples)}"
        try:
            asked = {name: of_partial(name, group.header, columns) for name in self.task.columns}
        except ValueError as error:
            return str(error)
        if list(group.header.images) != self._image_references():
            return "its images are not the task's"
        own_prompts = REWARD_COLUMN in columns
        finished = [wire.finish_reason in _FINISH for wire in wires]
        given_columns = given_of_wire(group.header, columns, finished=finished)
        at, turns_at, taken = 0, 0, list[SampleProgress]()
        for i, wire in enumerate(wires):
            sample = _sample_of(wire, columns, at)
            sample.columns = {name: of_samples[i] for name, of_samples in asked.items()}
            prompt = columns[layout.TOKEN_IDS][at : at + wire.prompt_len].astype(np.int32)
            at += wire.tokens
            if not np.array_equal(prompt, self.prompt_ids):
                if not own_prompts:
                    return "its prompt is not the task's"
                sample.prompt_ids = prompt
            if own_prompts:
                reward = float(columns[REWARD_COLUMN][i].item())
                sample.reward = None if math.isnan(reward) else reward
                sample.given = given_columns[i]
                finishes = columns[FINISH_COLUMN][turns_at : turns_at + len(wire.turns)].tolist()
                sample.turns = [
                    TurnNote(turn.role, turn.start - wire.prompt_len, turn.end - wire.prompt_len, _turn_finish(finish))
                    for turn, finish in zip(wire.turns, finishes, strict=True)
                ]
                turns_at += len(wire.turns)
            is_further = i > 0 and 0 < wire.trajectory == wires[i - 1].trajectory
            (taken[-1].rows if is_further else taken).append(sample)
        self.samples = taken
        self.resumed = self.generated
        return None

    def to_group(self, rewards: Sequence[float], worker_id: str) -> tuple[groups_pb2.GroupHeader, list[layout.Buffer]]:
        """Header of the finished group, and its payload in pieces. Raises GenerationFailed, InvalidField."""
        for i, sample in enumerate(self._rows):
            if sample.finish is None or not len(sample):
                what = "is not finished" if sample.finish is None else "ended without a token"
                raise GenerationFailed(self.lease.lease_id, f"sample {i} {what}")
        if ROUTED_EXPERTS in self.task.columns:
            self._check_positions()
        more: list[tuple[groups_pb2.Column, layout.Rows]] = []
        if any(row.given or row.scored for row in self._rows):
            columns = [
                both(row.given, row.scored if row is sample else of_trajectory(sample.scored))
                for sample in self.samples
                for row in (sample, *sample.rows)
            ]
            check_alike(dict(enumerate(columns)))
            more = given_to_wire(columns, self._lengths)
        header, payload = self._encode(rewards, worker_id, more=more)
        header.metadata_json = self.task.metadata_json
        check_group(header, sum(map(len, payload)))
        return header, payload

    def to_partial_rollout(self, worker_id: str) -> groups_pb2.Group | None:
        """Everything so far, unfinished samples as ABORTED; None when there is not a single token.

        What does not fit into a message is left out: rows that the next call gives again, then finished samples, the
        last first.
        """
        if not self.tokens:
            return None
        header, payload = self._encode_partial(worker_id)
        while sum(map(len, payload)) > MOST_PARTIAL_BYTES and self._forget_some():
            header, payload = self._encode_partial(worker_id)
        return groups_pb2.Group(header=header, payload=b"".join(payload))

    def _encode_partial(self, worker_id: str) -> tuple[groups_pb2.GroupHeader, list[layout.Buffer]]:
        return self._encode([0.0] * len(self.samples), worker_id, more=self._own_columns(), partial=True)

    @property
    def _is_rowed(self) -> bool:
        """True where some sample has more than one row."""
        return any(sample.rows for sample in self.samples)

    def _check_positions(self) -> None:
        """Raise GenerationFailed where an input of a generated token has no row of the engine's."""
        for i, sample in enumerate(self._rows):
            needed = len(self._prompt(sample)) + int(np.flatnonzero(sample.mask)[-1])
            if (known := sample.positions_known) < needed:
                why = f"sample {i} has {ROUTED_EXPERTS} of {known} positions, and {needed} are inputs of its tokens"
                raise GenerationFailed(self.lease.lease_id, why)

    def _forget_some(self) -> bool:
        """Forget rows that the next call can give again, those of samples that go on; where there are none, the last
        finished sample. False when there is none either.
        """
        unfinished = [row for i in self.unfinished for row in (self.samples[i], *self.samples[i].rows)]
        going_on = [row for row in unfinished if row.positions_known]
        for sample in going_on:
            sample.columns[ROUTED_EXPERTS] = none_of(ROUTED_EXPERTS)
        finished = [i for i, sample in enumerate(self.samples) if sample.finish is not None]
        if not going_on and finished:
            self.start_anew(finished[-1], "too_large")
        return bool(going_on or finished)

    def _own_columns(self) -> list[tuple[groups_pb2.Column, layout.Rows]]:
        """Columns of what a rollout function's samples have beyond those of a single turn."""
        samples = self._rows
        if not any(sample.turns or sample.reward is not None or sample.prompt_ids is not None for sample in samples):
            return []
        rewards = np.array([math.nan if s.reward is None else s.reward for s in samples], np.float64)
        finishes = np.array([_TURN_FINISHES.index(note.finish) for s in samples for note in s.turns], np.uint8)
        rows = [len(sample.turns) for sample in samples]
        finish_column = layout.column_of(FINISH_COLUMN, finishes, groups_pb2.AXIS_RAGGED, rows)
        return [
            (layout.column_of(REWARD_COLUMN, rewards, groups_pb2.AXIS_SAMPLE), rewards),
            (finish_column, finishes),
            *given_to_wire([sample.given for sample in samples], self._lengths),
        ]

    def _image_references(self) -> list[groups_pb2.ImageRef]:
        return [message_of(groups_pb2.ImageRef, image) for image in self.images]

    @property
    def _lengths(self) -> list[int]:
        """Tokens of each row, prompt and response."""
        return [len(self._prompt(row)) + len(row) for row in self._rows]

    def _encode(
        self,
        rewards: Sequence[float],
        worker_id: str,
        *,
        more: Sequence[tuple[groups_pb2.Column, layout.Rows]] = (),
        partial: bool = False,
    ) -> tuple[groups_pb2.GroupHeader, list[layout.Buffer]]:
        rows = self._rows
        prompts = [self._prompt(row) for row in rows]
        lengths = [len(prompt) for prompt in prompts]
        # What is not trained has mask 0 for whoever reads the group; in a partial rollout it says what the model wrote.
        kept = [row if row.trainable or partial else _context(row) for row in rows]
        # What lies before a response: a prompt has log-probability 0 and mask 0.
        none = np.zeros(max(lengths), np.float32), np.zeros(max(lengths), np.uint8)
        columns: list[tuple[groups_pb2.Column, layout.Rows]] = [
            (_TOKEN_COLUMNS[0], _interleaved(prompts, [row.output_ids for row in rows])),
            (_TOKEN_COLUMNS[1], _interleaved([none[0][:n] for n in lengths], [row.logprobs for row in kept])),
            (_TOKEN_COLUMNS[2], _interleaved([none[1][:n] for n in lengths], [row.mask for row in kept])),
        ]
        for name in self.task.columns:
            made = [row.columns[name] for row in rows]
            columns += columns_of(name, made, lengths, self._lengths, partial=partial)
        columns += more
        header = groups_pb2.GroupHeader(
            task_id=self.task.task_id,
            incarnation=self.lease.incarnation,
            lease_id=self.lease.lease_id,
            environment=self.task.environment,
            columns=[column for column, _ in columns],
            worker_id=worker_id,
            images=self._image_references(),
        )
        for sample, reward, number in zip(self.samples, rewards, count(1), strict=False):
            for row in (sample, *sample.rows):
                own = reward if row is sample or row.reward is None else row.reward
                wire = _add_sample(header, row if partial else _context(row), len(self._prompt(row)), own)
                if self._is_rowed:
                    wire.trajectory = number
        return header, layout.payload_pieces([rows for _, rows in columns])


_TOKEN_COLUMNS = [
    groups_pb2.Column(name=name, dtype=dtype, axis=groups_pb2.AXIS_TOKEN)  # type: ignore[arg-type]
    for name, dtype in layout.REQUIRED_COLUMNS
]
"""Header entries of the columns that every group has: token ids, log-probabilities, mask."""


def _turn_finish(code: int) -> FinishReason | None:
    return _TURN_FINISHES[code] if code < len(_TURN_FINISHES) else None


def _context(row: SampleProgress) -> SampleProgress:
    """A row as the trainer gets it: what is not trainable has neither mask nor log-probabilities."""
    if row.trainable:
        return row
    return replace(row, mask=np.zeros_like(row.mask), logprobs=np.zeros_like(row.logprobs))


def _add_sample(
    header: groups_pb2.GroupHeader, sample: SampleProgress, prompt: int, reward: float
) -> groups_pb2.Sample:
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


def _sample_of(wire: groups_pb2.Sample, columns: Mapping[str, layout.Array], at: int) -> SampleProgress:
    """A sample of a partial rollout, whose first token is `at` in the columns."""
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


def _interleaved(prompts: Sequence[npt.NDArray[N]], responses: Sequence[npt.NDArray[N]]) -> list[npt.NDArray[N]]:
    """The prompt before each response: prompt 0, response 0, prompt 1, response 1, …."""
    return [part for both in zip(prompts, responses, strict=True) for part in both]
