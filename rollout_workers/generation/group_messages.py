"""Messages of the samples of a group: the finished group for the trainer, a partial rollout for another worker.

In a finished group, what is not trained has mask 0 for whoever reads it. A partial rollout says what the model wrote.
What a rollout function's samples have beyond those of a single turn, it has in columns of its own.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from buffer_wire import layout
from buffer_wire.engine_columns import ROUTED_EXPERTS
from buffer_wire.messages import message_of
from buffer_wire.validate import check_group
from rollout_buffer.v1 import groups_pb2, tasks_pb2
from rollout_workers.engine.types import FinishReason, PromptImage
from rollout_workers.errors import GenerationFailed
from rollout_workers.generation.columns.asked import Made, columns_of, of_partial
from rollout_workers.generation.columns.given import (
    FINISH_COLUMN,
    REWARD_COLUMN,
    both,
    check_alike,
    given_of_wire,
    given_to_wire,
    of_trajectory,
)
from rollout_workers.generation.sample import N, SampleProgress, TokenIds, TurnNote, add_sample, sample_of

Message: TypeAlias = tuple[groups_pb2.GroupHeader, list[layout.Buffer]]
"""Header of a group, and its payload in pieces."""

_TURN_FINISHES: tuple[FinishReason | None, ...] = (None, "stop", "length")
_TOKEN_COLUMNS = [
    groups_pb2.Column(name=name, dtype=dtype, axis=groups_pb2.AXIS_TOKEN)  # type: ignore[arg-type]
    for name, dtype in layout.REQUIRED_COLUMNS
]
"""Header entries of the columns that every group has: token ids, log-probabilities, mask."""


def rows_of(samples: Sequence[SampleProgress]) -> list[SampleProgress]:
    """Every row: each sample, and its further ones behind it."""
    return [row for sample in samples for row in sample.trajectory]


@dataclass(frozen=True, slots=True, eq=False)
class GroupMessages:
    """Messages of the group of one lease."""

    lease: tasks_pb2.Lease
    prompt_ids: TokenIds
    """Prompt of samples that have none of their own, int32 [p]."""
    images: Sequence[PromptImage]
    """Images of the prompt."""

    def finished(self, samples: Sequence[SampleProgress], rewards: Sequence[float], worker_id: str) -> Message:
        """The finished group. Raises GenerationFailed, InvalidField."""
        for i, row in enumerate(rows_of(samples)):
            if row.finish is None or not len(row):
                what = "is not finished" if row.finish is None else "ended without a token"
                raise GenerationFailed(self.lease.lease_id, f"sample {i} {what}")
            if ROUTED_EXPERTS in self.lease.task.columns:
                self._check_positions(i, row)
        header, payload = self._message(samples, rewards, worker_id, partial=False)
        header.metadata_json = self.lease.task.metadata_json
        check_group(header, sum(map(len, payload)))
        return header, payload

    def partial(self, samples: Sequence[SampleProgress], worker_id: str) -> Message:
        """A partial rollout, unfinished samples as ABORTED."""
        return self._message(samples, [0.0] * len(samples), worker_id, partial=True)

    def samples_of(self, group: groups_pb2.Group, count: int) -> list[SampleProgress]:
        """The `count` samples of a partial rollout. Raises ValueError, InvalidField where it cannot be used."""
        check_group(group.header, len(group.payload), partial_rollout=True)
        columns = layout.read_payload(group.header, group.payload)
        wires = group.header.samples
        if (found := wires[-1].trajectory or len(wires)) != count:
            raise ValueError(f"it has {found} samples, the task asks for {count}")
        asked = {name: of_partial(name, group.header, columns) for name in self.lease.task.columns}
        if list(group.header.images) != self._image_references():
            raise ValueError("its images are not the task's")
        rows = []
        at = 0
        for i, wire in enumerate(wires):
            row = sample_of(wire, columns, at)
            row.columns = {name: of_rows[i] for name, of_rows in asked.items()}
            prompt = columns[layout.TOKEN_IDS][at : at + wire.prompt_len].astype(np.int32)
            at += wire.tokens
            if not np.array_equal(prompt, self.prompt_ids):
                if REWARD_COLUMN not in columns:
                    raise ValueError("its prompt is not the task's")
                row.prompt_ids = prompt
            rows.append(row)
        if REWARD_COLUMN in columns:
            _take_own_columns(rows, group.header, columns)
        samples: list[SampleProgress] = []
        for i, (wire, row) in enumerate(zip(wires, rows, strict=True)):
            is_further = i > 0 and 0 < wire.trajectory == wires[i - 1].trajectory
            (samples[-1].rows if is_further else samples).append(row)
        return samples

    def _check_positions(self, i: int, row: SampleProgress) -> None:
        """Raise GenerationFailed where an input of a generated token has no row of the engine's."""
        needed = len(row.prompt(self.prompt_ids)) + int(np.flatnonzero(row.mask)[-1])
        if (known := row.positions_known) < needed:
            why = f"sample {i} has {ROUTED_EXPERTS} of {known} positions, and {needed} are inputs of its tokens"
            raise GenerationFailed(self.lease.lease_id, why)

    def _image_references(self) -> list[groups_pb2.ImageRef]:
        return [message_of(groups_pb2.ImageRef, image) for image in self.images]

    def _message(
        self, samples: Sequence[SampleProgress], rewards: Sequence[float], worker_id: str, *, partial: bool
    ) -> Message:
        task, rows = self.lease.task, rows_of(samples)
        shown = rows if partial else [row.for_trainer() for row in rows]
        prompts = [row.prompt(self.prompt_ids) for row in rows]
        lengths = [len(prompt) for prompt in prompts]
        totals = [length + len(row) for length, row in zip(lengths, rows, strict=True)]
        # What lies before a response: a prompt has log-probability 0 and mask 0.
        none = np.zeros(max(lengths), np.float32), np.zeros(max(lengths), np.uint8)
        columns: Made = [
            (_TOKEN_COLUMNS[0], _interleaved(prompts, [row.output_ids for row in shown])),
            (_TOKEN_COLUMNS[1], _interleaved([none[0][:n] for n in lengths], [row.logprobs for row in shown])),
            (_TOKEN_COLUMNS[2], _interleaved([none[1][:n] for n in lengths], [row.mask for row in shown])),
        ]
        for name in task.columns:
            columns += columns_of(name, [row.columns[name] for row in rows], lengths, totals, partial=partial)
        columns += _own_columns(rows, totals) if partial else _given_columns(samples, totals)
        header = groups_pb2.GroupHeader(
            task_id=task.task_id,
            incarnation=self.lease.incarnation,
            lease_id=self.lease.lease_id,
            environment=task.environment,
            columns=[column for column, _ in columns],
            worker_id=worker_id,
            images=self._image_references(),
        )
        entries = [
            (number, reward if row is sample or row.reward is None else row.reward)
            for number, (sample, reward) in enumerate(zip(samples, rewards, strict=True), 1)
            for row in sample.trajectory
        ]
        for row, length, (number, reward) in zip(shown, lengths, entries, strict=True):
            wire = add_sample(header, row, length, reward)
            if len(rows) > len(samples):
                wire.trajectory = number
        return header, layout.payload_pieces([values for _, values in columns])


def _given_columns(samples: Sequence[SampleProgress], totals: Sequence[int]) -> Made:
    """Columns that the user's functions gave, of rows with so many tokens. Raises InvalidField."""
    if not any(row.given or row.scored for row in rows_of(samples)):
        return []
    columns = [
        both(row.given, row.scored if row is sample else of_trajectory(sample.scored))
        for sample in samples
        for row in sample.trajectory
    ]
    check_alike(dict(enumerate(columns)))
    return given_to_wire(columns, totals)


def _own_columns(rows: Sequence[SampleProgress], totals: Sequence[int]) -> Made:
    """Columns of what a rollout function's samples have beyond those of a single turn."""
    if not any(row.turns or row.reward is not None or row.prompt_ids is not None for row in rows):
        return []
    rewards = np.array([math.nan if row.reward is None else row.reward for row in rows], np.float64)
    finishes = np.array([_TURN_FINISHES.index(note.finish) for row in rows for note in row.turns], np.uint8)
    counts = [len(row.turns) for row in rows]
    return [
        (layout.column_of(REWARD_COLUMN, rewards, groups_pb2.AXIS_SAMPLE), rewards),
        (layout.column_of(FINISH_COLUMN, finishes, groups_pb2.AXIS_RAGGED, counts), finishes),
        *given_to_wire([row.given for row in rows], totals),
    ]


def _take_own_columns(
    rows: Sequence[SampleProgress], header: groups_pb2.GroupHeader, columns: Mapping[str, layout.Array]
) -> None:
    """The inverse of `_own_columns`."""
    given = given_of_wire(header, columns, finished=[row.finish is not None for row in rows])
    turns_at = 0
    rewards = columns[REWARD_COLUMN].tolist()
    for row, wire, reward, of_row in zip(rows, header.samples, rewards, given, strict=True):
        row.reward, row.given = None if math.isnan(reward) else reward, of_row
        finishes = columns[FINISH_COLUMN][turns_at : turns_at + len(wire.turns)].tolist()
        row.turns = [
            TurnNote(turn.role, turn.start - wire.prompt_len, turn.end - wire.prompt_len, _turn_finish(finish))
            for turn, finish in zip(wire.turns, finishes, strict=True)
        ]
        turns_at += len(wire.turns)


def _turn_finish(code: int) -> FinishReason | None:
    return _TURN_FINISHES[code] if code < len(_TURN_FINISHES) else None


def _interleaved(prompts: Sequence[npt.NDArray[N]], responses: Sequence[npt.NDArray[N]]) -> list[npt.NDArray[N]]:
    """The prompt before each response: prompt 0, response 0, prompt 1, response 1, …."""
    return [part for both in zip(prompts, responses, strict=True) for part in both]
