"""Groups that Miles' own engines have finished, as groups of the buffer and back.

Tokens, log-probabilities and loss masks travel as the wire's columns, routed experts and indexer choices as int32
columns; every other field of a sample, and the prompt group that can be submitted again, as JSON in two columns of
bytes. Nothing is pickled.

Invariants: what comes back is equal to what was put, field by field, log-probabilities to the precision of float32, and
depends on the bytes alone; a field that is neither JSON nor one of those arrays is refused by name when it is put.

Versions: `weight_versions` of a sample names a version for each call to the engine, newer Miles a span of tokens for
each. Where it does not say which tokens a call made, the oldest version is taken for all of the response but its last
tokens, one for each newer version: head and tail are exact, and what lies between is not taken for newer than it is.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from buffer_wire.errors import InvalidField
from buffer_wire.layout import LOGPROBS, LOSS_MASK, TOKEN_IDS, Array, column_of, write_payload
from rollout_buffer.v1 import groups_pb2 as pb
from rollout_buffer.v1.common_pb2 import WeightVersion
from trainer_client import batch
from trainer_client.integrations.miles.contract import Sample

FIELDS, PROMPTS = "sample_fields", "prompt_fields"
ARRAYS = ("rollout_routed_experts", "rollout_indexer_topk")
_PER_TOKEN = ("tokens", "rollout_log_probs", "loss_mask")

Finished: TypeAlias = "list[Sample | list[Sample]]"
"""A finished group: samples, or lists of them where a generate function returns several for one trajectory."""


class Record(Sample, Protocol):
    """A sample that can be taken apart, as Miles' can."""

    def to_dict(self) -> dict[str, object]:
        """Every field; enums as their values."""

    def reset_for_retry(self) -> None:
        """Forget what was generated."""


Span: TypeAlias = tuple[int, int, int]
"""(version, start, end) of tokens of a sample."""


def flat(group: Finished) -> list[Record]:
    """All samples of a group."""
    samples: list[Sample] = []
    for item in group:
        samples += item if isinstance(item, list) else [item]
    return cast("list[Record]", samples)


def labels(sample: Sample) -> list[str]:
    """The versions that a sample names, as Miles names them; not those of engines that were never updated."""
    named: list[str] = []
    for version in cast("list[object]", sample.weight_versions):
        named += [span.version for span in version.spans] if hasattr(version, "spans") else [str(version)]
    return [label for label in named if label.isdigit()]


@dataclass(frozen=True, slots=True)
class Versions:
    """Miles' version labels, which begin anew with each of its processes, as the run's versions, which do not."""

    epoch: int
    offset: int
    """The run's version is Miles' plus this."""
    published: int
    """What is taken for a sample that names no version."""

    def spans(self, sample: Sample) -> list[Span]:
        """Which of the run's versions made which tokens of the response, in order, versions not falling."""
        end = len(sample.tokens)
        start = end - sample.response_length
        calls = [call.spans for call in cast("list[object]", sample.weight_versions) if hasattr(call, "spans")]
        if calls:
            begins = [(self._version_of(s.version), s.abs_start) for call in calls for s in call]
            return _tiled(begins, start, end)
        named = sorted({int(label) + self.offset for label in labels(sample)}) or [self.published]
        named = [max(0, version) for version in named[-max(1, sample.response_length) :]]
        places = [start, *range(end - len(named) + 1, end)]
        return _tiled(list(zip(named, places, strict=True)), start, end)

    def _version_of(self, label: str) -> int:
        return int(label) + self.offset if label.isdigit() else self.published

    def label(self, version: int) -> str:
        """Miles' name for a version of the run."""
        return str(max(0, version - self.offset))


def _tiled(begins: Sequence[tuple[int, int]], start: int, end: int) -> list[Span]:
    """Spans that begin where versions do and tile [start, end); what an environment wrote goes with what precedes."""
    spans: list[Span] = []
    newest = 0
    for version, at in sorted(begins, key=lambda begin: begin[1]):
        if at >= end:
            break
        newest = max(newest, version)
        begin = max(start, at) if spans else start
        if spans and (spans[-1][1] >= begin or spans[-1][0] == newest):
            spans[-1] = (newest, spans[-1][1], end)
            continue
        if spans:
            spans[-1] = (*spans[-1][:2], begin)
        spans.append((newest, begin, end))
    return spans


def to_wire(
    task_id: str, group: Finished, prompts: Sequence[Sample], versions: Versions
) -> tuple[pb.GroupHeader, bytes]:
    """Header and payload of a finished group. Raises InvalidField for a field that cannot travel."""
    samples = flat(group)
    for i, sample in enumerate(samples):
        if sample.response_length < 1:
            raise InvalidField(f"group[{i}].response_length", sample.response_length, "at least 1")
    fields = [_fields(f"group[{i}]", sample, apart=True) for i, sample in enumerate(samples)]
    shape = [len(item) if isinstance(item, list) else 0 for item in group]
    columns: list[tuple[str, Array, int, list[int]]] = [
        (TOKEN_IDS, np.concatenate([np.asarray(s.tokens, np.int32) for s in samples]), pb.AXIS_TOKEN, []),
        (LOGPROBS, np.concatenate([_whole(s, s.rollout_log_probs, np.float32) for s in samples]), pb.AXIS_TOKEN, []),
        (LOSS_MASK, np.concatenate([_mask(s) for s in samples]), pb.AXIS_TOKEN, []),
        _bytes_column(FIELDS, fields),
    ]
    prompt_fields = [
        _fields(f"prompt_group[{i}]", cast("Record", prompt), apart=False) for i, prompt in enumerate(prompts)
    ]
    # Ragged columns have an entry for each sample; all prompts are in the first.
    columns.append(_bytes_column(PROMPTS, [{"prompts": prompt_fields}, *({} for _ in samples[1:])]))
    for name in ARRAYS:
        arrays = [getattr(sample, name, None) for sample in samples]
        if any(array is not None for array in arrays):
            columns.append(_ragged(name, arrays))
    header = pb.GroupHeader(
        task_id=task_id,
        samples=[_sample(sample, versions) for sample in samples],
        columns=[column_of(name, array, axis, rows) for name, array, axis, rows in columns],
        metadata_json=json.dumps({"shape": shape, "offset": versions.offset, "epoch": versions.epoch}),
        worker_id="miles",
    )
    return header, write_payload([array for _, array, _, _ in columns])


def from_wire(
    group: batch.Group, make: Callable[[dict[str, object]], Sample], versions: Versions
) -> tuple[list[Sample], Finished]:
    """Prompt group and finished group; `make` is `Sample.from_dict`."""
    facts = group.metadata
    samples = [_made(made, make) for made in group.samples]
    if facts["epoch"] != versions.epoch:
        # Another process of Miles named the versions; only plain labels can be named anew.
        for sample, made in zip(samples, group.samples, strict=True):
            if all(isinstance(label, str) for label in sample.weight_versions):
                sample.weight_versions = [versions.label(int(made.versions[span.start])) for span in made.spans]
    prompts = json.loads(group.samples[0].extras[PROMPTS].tobytes())["prompts"]
    rest = iter(samples)
    shape = cast("list[int]", facts["shape"])
    finished: Finished = [[next(rest) for _ in range(size)] if size else next(rest) for size in shape]
    return [make(fields) for fields in prompts], finished


def _sample(sample: Sample, versions: Versions) -> pb.Sample:
    length = len(sample.tokens)
    reward = sample.reward
    return pb.Sample(
        tokens=length,
        prompt_len=length - sample.response_length,
        loss_tokens=int(_mask(sample).sum()),
        # A reward of several parts travels with the other fields; the service's filters do not see it.
        reward=float(reward) if isinstance(reward, int | float) else 0.0,
        finish_reason=pb.FINISH_REASON_LENGTH if sample.status.value == "truncated" else pb.FINISH_REASON_STOP,
        spans=[
            pb.VersionSpan(version=WeightVersion(epoch=versions.epoch, version=version), start=start, end=end)
            for version, start, end in versions.spans(sample)
        ],
    )


def _whole(sample: Sample, values: Sequence[float] | None, dtype: type[np.generic]) -> npt.NDArray[np.generic]:
    """[T] from values of the response, 0 for the prompt and where there are none."""
    whole = np.zeros(len(sample.tokens), dtype)
    if values is not None and sample.response_length:
        whole[-sample.response_length :] = np.asarray(values, dtype)
    return whole


def _mask(sample: Sample) -> npt.NDArray[np.generic]:
    return _whole(sample, [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask, np.uint8)


def _fields(name: str, sample: Record, *, apart: bool) -> dict[str, object]:
    """What travels as JSON; with `apart` all but the columns of numbers, and which of those there are."""
    fields = dict(sample.to_dict())
    for array in ARRAYS:
        fields.pop(array, None)
    if apart:
        given = {key: fields.pop(key) for key in _PER_TOKEN}
        fields["given"] = [key for key, value in given.items() if value is not None]
    for key, value in fields.items():
        try:
            fields[key] = json.loads(json.dumps(_plain(value), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise InvalidField(f"{name}.{key}", type(value).__name__, f"JSON, to travel ({error})") from error
    return fields


def _plain(value: object) -> object:
    """Version spans of newer Miles as the dicts that its `from_dict` takes."""
    if isinstance(value, list):
        return [item.to_dicts() if hasattr(item, "to_dicts") else item for item in value]
    return value


def _bytes_column(name: str, fields: Sequence[dict[str, object]]) -> tuple[str, Array, int, list[int]]:
    texts = [json.dumps(each, ensure_ascii=False, separators=(",", ":")).encode() for each in fields]
    return name, np.frombuffer(b"".join(texts), np.uint8), pb.AXIS_RAGGED, [len(text) for text in texts]


def _ragged(name: str, arrays: Sequence[Array | None]) -> tuple[str, Array, int, list[int]]:
    shape = next(np.shape(array)[1:] for array in arrays if array is not None)
    rows = [np.zeros((0, *shape), np.int32) if array is None else np.asarray(array, np.int32) for array in arrays]
    return name, np.concatenate(rows), pb.AXIS_RAGGED, [len(each) for each in rows]


def _made(made: batch.Sample, make: Callable[[dict[str, object]], Sample]) -> Sample:
    fields = json.loads(made.extras[FIELDS].tobytes())
    given = fields.pop("given", ())
    response = slice(made.prompt_len, None)
    columns = {
        "tokens": made.token_ids.tolist(),
        "rollout_log_probs": made.logprobs[response].tolist(),
        "loss_mask": made.loss_mask[response].tolist(),
    }
    fields.update({key: columns[key] if key in given else None for key in _PER_TOKEN})
    for name in ARRAYS:
        if name in made.extras:
            fields[name] = made.extras[name] if len(made.extras[name]) else None
    return make(fields)
