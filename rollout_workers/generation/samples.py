"""Samples of one group while they grow, over any number of engine calls.

They begin with a lease, with or without a partial rollout, and end as a finished group or as a partial rollout for
another worker.

Invariant: generated tokens that leave a group are counted: `received` + `resumed` = those of the samples + the sum of
`discarded`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from buffer_wire.engine_columns import ROUTED_EXPERTS
from buffer_wire.errors import InvalidField
from buffer_wire.limits import MAX_MESSAGE_BYTES, MAX_SAMPLES
from rollout_buffer.v1 import groups_pb2, tasks_pb2
from rollout_workers.engine.token_rows import none_of
from rollout_workers.engine.types import GeneratedSample, PromptImage, SampleRequest
from rollout_workers.generation.columns.given import Columns, check_alike
from rollout_workers.generation.group_messages import GroupMessages, Message, rows_of
from rollout_workers.generation.sample import SampleProgress, TokenIds
from rollout_workers.versions import Version

ROW_STRIDE = 1 << 16
"""Distance of indexes of the rows of a sample: those of sample i are i, i + ROW_STRIDE, i + 2 · ROW_STRIDE, …."""
MOST_PARTIAL_BYTES = MAX_MESSAGE_BYTES - (2 << 20)
"""Largest payload of a partial rollout that is handed back whole, in bytes: it travels in one message."""


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
        self.samples = [SampleProgress.empty(self.task.columns) for _ in range(self.task.group_size + surplus)]
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
        before = self.generated
        with self._discarding("surplus"):
            self.samples = [self.samples[i] for i in kept]
        return kept, before - self.generated

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
        return rows_of(self.samples)

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
            rows.append(SampleProgress.empty(self.task.columns))
        return sample + number * ROW_STRIDE

    def keep_rows(self, sample: int, kept: Sequence[SampleProgress]) -> None:
        """Keep these further rows of a sample; what others have, which nobody has begun again, is discarded."""
        with self._discarding("not_repeated"):
            self.samples[sample].rows = list(kept)

    def prompt_of(self, index: int) -> TokenIds:
        """Prompt of this row, int32 [p]."""
        return self.row(index).prompt(self.prompt_ids)

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

    @contextmanager
    def _discarding(self, reason: str) -> Iterator[None]:
        """Count the generated tokens that samples lose meanwhile as discarded for `reason`."""
        before = self.generated
        yield
        if lost := before - self.generated:
            self.discarded[reason] += lost

    def take_back(self, index: int, turns: int, reason: str) -> None:
        """Forget a response behind its first `turns` turns; its generated tokens count as discarded for `reason`."""
        if not turns:
            self.clear_row(index, reason)
            return
        with self._discarding(reason):
            self.row(index).cut(turns, len(self.prompt_of(index)))

    def start_anew(self, index: int, reason: str) -> None:
        """Forget a sample with all its rows; their generated tokens count as discarded for `reason`."""
        sample = self.samples[index]
        with self._discarding(reason):
            sample.clear()
            sample.rows = []

    def clear_row(self, index: int, reason: str) -> None:
        """Forget a row's response; its generated tokens count as discarded for `reason`."""
        with self._discarding(reason):
            self.row(index).clear()

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
        rows = [row for i in indices for row in self.row(i).trajectory]
        return max((row.spans[-1].version for row in rows if row.spans), default=None)

    @property
    def oldest(self) -> Version | None:
        """Version with which the group was begun: the smallest of a first token."""
        return min((sample.spans[0].version for sample in self.samples if sample.spans), default=None)

    def take_partial_rollout(self) -> str | None:
        """Start from what the lease's earlier attempt left; returns why it cannot be used, or None.

        Without a usable partial rollout the samples stay empty: the work is done anew, never wrongly.
        """
        try:
            self.samples = self._messages.samples_of(self.lease.partial_rollout, len(self.samples))
        except (InvalidField, ValueError) as error:
            return str(error)
        self.resumed = self.generated
        return None

    def to_group(self, rewards: Sequence[float], worker_id: str) -> Message:
        """The finished group. Raises GenerationFailed, InvalidField."""
        return self._messages.finished(self.samples, rewards, worker_id)

    def to_partial_rollout(self, worker_id: str) -> groups_pb2.Group | None:
        """Everything so far, unfinished samples as ABORTED; None when there is not a single token.

        What does not fit into a message is left out: rows that the next call gives again, then finished samples, the
        last first.
        """
        if not self.tokens:
            return None
        header, payload = self._messages.partial(self.samples, worker_id)
        while sum(map(len, payload)) > MOST_PARTIAL_BYTES and self._forget_some():
            header, payload = self._messages.partial(self.samples, worker_id)
        return groups_pb2.Group(header=header, payload=b"".join(payload))

    @property
    def _messages(self) -> GroupMessages:
        return GroupMessages(self.lease, self.prompt_ids, self.images)

    def _forget_some(self) -> bool:
        """Forget rows that the next call can give again, those of samples that go on; where there are none, the last
        finished sample. False when there is none either.
        """
        unfinished = rows_of([self.samples[i] for i in self.unfinished])
        going_on = [row for row in unfinished if row.positions_known]
        for sample in going_on:
            sample.columns[ROUTED_EXPERTS] = none_of(ROUTED_EXPERTS)
        finished = [i for i, sample in enumerate(self.samples) if sample.finish is not None]
        if not going_on and finished:
            self.start_anew(finished[-1], "too_large")
        return bool(going_on or finished)
