"""Finished groups of Miles' own engines, converted to groups of the buffer and back.

Tokens, log-probabilities and loss masks travel as the wire's columns, routed experts and indexer choices as int32
columns. Every other field of a sample, and the prompt group that can be submitted again, travels as JSON in two columns
of bytes (`values`). The wire has no form for a sample without a response. Such a sample travels as one token in its
columns and with all its fields in JSON.

Invariants: a group comes back equal to the one that was put, field by field, log-probabilities to the precision of
float32. The result depends on the bytes alone. Fields that cannot travel are named, and no group that Miles' own buffer
takes is refused.

Versions: `weight_versions` of a sample names a version for each call to the engine, not the tokens that it made. The
oldest version is taken for all of the response but its last tokens, one for each newer version. So head and tail are
exact, and no token between them counts as newer than it is.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from types import ModuleType
from typing import Protocol, TypeAlias, cast

import numpy as np

from buffer_wire.layout import LOGPROBS, LOSS_MASK, TOKEN_IDS, Array, column_of, write_payload
from rollout_buffer.v1 import groups_pb2 as pb
from rollout_buffer.v1.common_pb2 import WeightVersion
from trainer_client import batch
from trainer_client.integrations.miles.contract import Sample
from trainer_client.integrations.miles.values import decoded, encoded

FIELDS, PROMPTS = "sample_fields", "prompt_fields"
ARRAYS = ("rollout_routed_experts", "rollout_indexer_topk")
_PER_TOKEN = ("tokens", "rollout_log_probs", "loss_mask")

Finished: TypeAlias = "list[Sample | list[Sample]]"
"""Finished group: samples, or lists of them where a generate function returns several for one trajectory."""


class Record(Sample, Protocol):
    """Sample that can be converted to a dict, as Miles' can."""

    def to_dict(self) -> dict[str, object]:
        """Return every field; enums as their values."""


Span: TypeAlias = tuple[int, int, int]
"""Span of tokens of a sample: (version, start, end)."""

Kept: TypeAlias = list[dict[str, object]]
"""Fields that did not travel: of the samples of a finished group, then of its prompts."""


def flat(group: Finished) -> list[Record]:
    """List all samples of a group."""
    samples: list[Sample] = []
    for item in group:
        samples += item if isinstance(item, list) else [item]
    return cast("list[Record]", samples)


def versions_of(sample: Sample) -> list[int]:
    """List the versions that a sample names, by Miles' numbers; labels of engines that were never updated are
    left out.
    """
    return [int(label) for label in map(str, sample.weight_versions) if label.isdigit()]


@dataclass(frozen=True, slots=True)
class Versions:
    """Conversion between Miles' version labels, which begin anew with each of its processes, and the run's versions."""

    term: int
    offset: int
    """Offset to add to Miles' version for the run's version."""
    published: int
    """Version assumed for a sample that names none."""

    def spans(self, sample: Sample) -> list[Span]:
        """Split the response into spans by the run's versions, in order, versions not falling."""
        start, end = _extent(sample)
        named = sorted({max(0, version + self.offset) for version in versions_of(sample)}) or [self.published]
        named = named[start - end :]
        edges = [start, *range(end - len(named) + 1, end), end]
        return list(zip(named, edges, edges[1:], strict=False))

    def label(self, version: int) -> str:
        """Return Miles' name for a version of the run."""
        return str(max(0, version - self.offset))


def to_wire(
    task_id: str, group: Finished, prompts: Sequence[Sample], versions: Versions, types: ModuleType
) -> tuple[pb.GroupHeader, bytes, Kept]:
    """Convert a finished group to header, payload and the fields that cannot travel. `types`: Miles' `utils.types`."""
    samples = flat(group)
    texts, kept = zip(
        *[_fields(sample, _PER_TOKEN if _in_columns(sample) else (), types) for sample in samples],
        *[_fields(cast("Record", prompt), (), types) for prompt in prompts],
        strict=True,
    )
    # Ragged columns have an entry for each sample; all prompts are in the first.
    prompt_texts = ["[" + ",".join(texts[len(samples) :]) + "]", *("" for _ in samples[1:])]
    columns: list[tuple[str, Array, int, list[int]]] = [
        (TOKEN_IDS, np.concatenate([_tokens(s) for s in samples]), pb.AXIS_TOKEN, []),
        (LOGPROBS, np.concatenate([_whole(s, s.rollout_log_probs, np.float32) for s in samples]), pb.AXIS_TOKEN, []),
        (LOSS_MASK, np.concatenate([_mask(s) for s in samples]), pb.AXIS_TOKEN, []),
        _bytes_column(FIELDS, texts[: len(samples)]),
        _bytes_column(PROMPTS, prompt_texts),
    ]
    for name in ARRAYS:
        arrays = [getattr(sample, name, None) for sample in samples]
        if any(array is not None for array in arrays):
            columns.append(_ragged(name, arrays))
    shape = [len(item) if isinstance(item, list) else None for item in group]
    header = pb.GroupHeader(
        task_id=task_id,
        samples=[_sample(sample, versions) for sample in samples],
        columns=[column_of(name, array, axis, rows) for name, array, axis, rows in columns],
        metadata_json=json.dumps({"shape": shape, "offset": versions.offset, "term": versions.term}),
        worker_id="miles",
    )
    return header, write_payload([array for _, array, _, _ in columns]), list(kept)


def from_wire(
    group: batch.Group, types: ModuleType, versions: Versions, kept: Kept | None = None
) -> tuple[list[Sample], Finished]:
    """Convert back to prompt group and finished group; `kept` is from `to_wire`, where this process put the group."""
    facts = group.metadata
    samples = [_made(made, types) for made in group.samples]
    if facts["term"] != versions.term:
        # Another process of Miles named the versions.
        for sample, made in zip(samples, group.samples, strict=True):
            if sample.weight_versions:
                sample.weight_versions = [versions.label(int(made.versions[span.start])) for span in made.spans]
    prompts = [_sample_of(record, types) for record in decoded(group.samples[0].extras[PROMPTS].tobytes(), types)]
    for sample, fields in zip((*samples, *prompts), kept or (), strict=False):
        for name, value in fields.items():
            setattr(sample, name, value)
    rest = iter(samples)
    shape = cast("list[int | None]", facts["shape"])
    return prompts, [next(rest) if size is None else [next(rest) for _ in range(size)] for size in shape]


def _in_columns(sample: Sample) -> bool:
    """True for a sample that fits the wire's columns: a response, each of whose tokens has every value or none."""
    length = sample.response_length
    lengths = {len(values) for values in (sample.rollout_log_probs, sample.loss_mask) if values is not None}
    return 0 < length <= len(sample.tokens) and lengths <= {length}


def _extent(sample: Sample) -> tuple[int, int]:
    """Return the response's first token and its end; (0, 1), of a substitute token, for a sample without columns."""
    end = len(sample.tokens)
    return (end - sample.response_length, end) if _in_columns(sample) else (0, 1)


def _sample(sample: Sample, versions: Versions) -> pb.Sample:
    start, end = _extent(sample)
    # A reward of several parts, or none that is a number, travels with the other fields; the service's filters do not
    # see it.
    reward = float(sample.reward) if isinstance(sample.reward, int | float | np.number) else 0.0
    return pb.Sample(
        tokens=end,
        prompt_len=start,
        loss_tokens=int(_mask(sample).sum()),
        reward=reward if isfinite(reward) else 0.0,
        finish_reason=pb.FINISH_REASON_LENGTH if sample.status.value == "truncated" else pb.FINISH_REASON_STOP,
        spans=[
            pb.VersionSpan(version=WeightVersion(term=versions.term, version=version), start=begin, end=until)
            for version, begin, until in versions.spans(sample)
        ],
    )


def _tokens(sample: Sample) -> Array:
    return np.asarray(sample.tokens, np.int32) if _in_columns(sample) else np.zeros(1, np.int32)


def _whole(sample: Sample, values: Sequence[float] | None, dtype: type[np.generic]) -> Array:
    """Extend values of the response to [T], 0 for the prompt and where there are none."""
    start, end = _extent(sample)
    whole = np.zeros(end, dtype)
    if values is not None and _in_columns(sample):
        whole[start:] = np.asarray(values, dtype)
    return whole


def _mask(sample: Sample) -> Array:
    return _whole(sample, [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask, np.uint8)


def _fields(sample: Record, in_columns: Sequence[str], types: ModuleType) -> tuple[str, dict[str, object]]:
    """Encode the fields that travel as JSON, and return those that cannot."""
    fields = {name: value for name, value in sample.to_dict().items() if name not in ARRAYS}
    given = [name for name in in_columns if fields.pop(name) is not None]
    record = {"given": given, "in_columns": bool(in_columns), "fields": fields}
    kept: dict[str, object] = {}
    try:
        return encoded(record, types), kept
    except (TypeError, ValueError):
        kept = {name: fields.pop(name) for name in tuple(fields) if not _travels(fields[name], types)}
        return encoded(record, types), kept


def _travels(value: object, types: ModuleType) -> bool:
    try:
        encoded(value, types)
    except (TypeError, ValueError):
        return False
    return True


def _bytes_column(name: str, texts: Sequence[str]) -> tuple[str, Array, int, list[int]]:
    rows = [text.encode(errors="surrogatepass") for text in texts]
    return name, np.frombuffer(b"".join(rows), np.uint8), pb.AXIS_RAGGED, [len(row) for row in rows]


def _ragged(name: str, arrays: Sequence[Array | None]) -> tuple[str, Array, int, list[int]]:
    shape = next(np.shape(array)[1:] for array in arrays if array is not None)
    rows = [np.zeros((0, *shape), np.int32) if array is None else np.asarray(array, np.int32) for array in arrays]
    return name, np.concatenate(rows), pb.AXIS_RAGGED, [len(each) for each in rows]


def _made(made: batch.Sample, types: ModuleType) -> Sample:
    record = decoded(made.extras[FIELDS].tobytes(), types)
    response = slice(made.prompt_len, None)
    columns: dict[str, object] = {
        "tokens": made.token_ids.tolist(),
        "rollout_log_probs": made.logprobs[response].tolist(),
        "loss_mask": made.loss_mask[response].tolist(),
    }
    extra: dict[str, object] = {}
    if record["in_columns"]:
        extra |= {name: columns[name] if name in record["given"] else None for name in _PER_TOKEN}
    for name in ARRAYS:
        if name in made.extras:
            extra[name] = made.extras[name] if len(made.extras[name]) else None
    return _sample_of(record, types, **extra)


def _sample_of(record: dict[str, dict[str, object]], types: ModuleType, **more: object) -> Sample:
    return cast("Sample", types.Sample.from_dict({**record["fields"], **more}))
