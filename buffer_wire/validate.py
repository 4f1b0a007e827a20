"""Bounds of groups, checked from header and payload length alone. Both ends use it: a client before it sends, the
service before anything is written.

Samples may be rows of trajectories. What decides about a group, its versions, rewards and lengths, is that of the rows
that are trainable.

Raises InvalidField naming the field (`samples[3].spans[0].start`), the value's shape and the limit.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite, prod

from buffer_wire import limits
from buffer_wire.errors import InvalidField
from buffer_wire.images.references import check_images
from buffer_wire.layout import NUMPY_DTYPES, REQUIRED_COLUMNS, ColumnSpec, column_spec, extent
from rollout_buffer.v1 import groups_pb2 as pb

_FINISHED = frozenset({pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH})
_MAYBE_UNFINISHED = _FINISHED | {pb.FINISH_REASON_ABORTED}


@dataclass(slots=True)
class GroupSummary:
    """Summary of a group by its checked header, which nobody changes. Versions are (term, version)."""

    tokens: int
    loss_tokens: int
    head: tuple[int, int] | None
    """Smallest version of any sample's first token; None for a partial rollout without any token."""
    tail: tuple[int, int] | None
    """Largest version of any sample's last token."""
    response_lengths: Sequence[int]
    """Response tokens of each sample that is trainable; so are the fields below of these alone."""
    rewards: Sequence[float]
    """Reward of each."""
    version_tokens: int
    """Sum over all response tokens of the version that made each."""
    tokens_by_version: Mapping[tuple[int, int], int]
    """Response tokens by the version that made them."""
    turns: int
    """Turns of role assistant; a sample without turns counts as one."""
    truncated_samples: int
    """Samples with finish reason LENGTH."""
    trajectories: int
    """Trajectories with a trainable row."""
    equal_rewards: bool
    """True when there are two or more, and what one policy wrote has the same reward in all of them."""
    mean_reward: float
    """Mean over the trajectories, and the policies in each, of the mean reward of the rows."""
    failed_samples: int = 0
    """Samples with a named failure, trainable or not."""
    trajectory_rewards: Sequence[float] = ()
    """Those means, where samples are rows, or not all are trainable; empty: the rewards themselves."""


def is_trainable(sample: pb.Sample) -> bool:
    """True unless the sample says that it must not be trained on."""
    return not sample.HasField("trainable") or sample.trainable


def has_rows(samples: Iterable[pb.Sample]) -> bool:
    """True where samples are rows of trajectories, or are not alike in what may be trained on, or in who wrote them."""
    return any(sample.trajectory or sample.HasField("trainable") or sample.policy for sample in samples)


def check_group(
    header: pb.GroupHeader, payload_len: int | None, *, partial_rollout: bool = False, of_stage: bool = False
) -> GroupSummary:
    """Check a group, a partial rollout, whose samples may be unfinished or empty, or what a stage adds. That is columns
    of other names alone. `payload_len` in bytes; None: the payload is not here.

    The service does this for every push, so the ordinary case reads each field once. A header that fails is checked
    again, slowly, for an error that names the field.
    """
    if not limits.TASK_ID.fullmatch(header.task_id):
        raise InvalidField("task_id", header.task_id, "1 to 128 characters of [A-Za-z0-9._:-]")
    if len(header.environment) > 64 or limits.CONTROL.search(header.environment):
        raise InvalidField("environment", header.environment, "at most 64 characters, none of them a control character")
    if len(header.worker_id) > 128 or limits.CONTROL.search(header.worker_id):
        raise InvalidField("worker_id", header.worker_id, "at most 128 characters, none of them a control character")
    if len(header.metadata_json) > limits.MAX_METADATA_BYTES:
        raise InvalidField(
            "metadata_json", f"{len(header.metadata_json)} characters", f"at most {limits.MAX_METADATA_BYTES}"
        )
    samples = header.samples
    if not 1 <= len(samples) <= limits.MAX_SAMPLES:
        raise InvalidField("samples", f"{len(samples)} samples", f"1 to {limits.MAX_SAMPLES} samples")
    if has_rows(samples):
        summary = _check_rows(samples, partial_rollout=partial_rollout)
    else:
        summary = _check_samples(list(enumerate(samples)), partial_rollout=partial_rollout)
    for i, sample in enumerate(samples):
        if sample.failure:
            if not limits.FAILURE.fullmatch(sample.failure):
                raise InvalidField(f"samples[{i}].failure", sample.failure, "1 to 64 characters of [a-z0-9_]")
            summary.failed_samples += 1
    if header.images:
        check_images("images", header.images, min([sample.prompt_len for sample in samples]), resolved=True)
    checked = _checked_added_columns if of_stage else _checked_columns
    specs = checked(len(samples), *[column.SerializeToString() for column in header.columns])
    expected = extent(specs, summary.tokens, len(samples))
    if payload_len not in (None, expected):
        raise InvalidField(
            "payload", f"{payload_len} bytes", f"the {expected} bytes that its {len(specs)} columns take"
        )
    return summary


def _check_rows(samples: Sequence[pb.Sample], *, partial_rollout: bool) -> GroupSummary:
    """Check samples that are rows of trajectories, of which some may not be trainable."""
    named, before = samples[0].trajectory > 0, 0
    trained: list[tuple[int, pb.Sample]] = []
    context: list[tuple[int, pb.Sample]] = []
    by_policy: dict[str, dict[int, list[float]]] = {}
    for i, sample in enumerate(samples):
        number = sample.trajectory
        if number not in ((before or 1, before + 1) if named else (0,)):
            limit = f"{before} or {before + 1}" if before else "1" if named else "0, as of the first sample"
            raise InvalidField(f"samples[{i}].trajectory", number, limit)
        if len(sample.policy) > limits.MAX_POLICY_CHARS or limits.CONTROL.search(sample.policy):
            limit = f"at most {limits.MAX_POLICY_CHARS} characters, none of them a control character"
            raise InvalidField(f"samples[{i}].policy", sample.policy, limit)
        before = number
        if is_trainable(sample) or (partial_rollout and sample.spans):
            trained.append((i, sample))
            by_policy.setdefault(sample.policy, {}).setdefault(number or -1 - i, []).append(sample.reward)
        elif sample.loss_tokens and not partial_rollout:
            raise InvalidField(f"samples[{i}].loss_tokens", sample.loss_tokens, "0: the sample is not trainable")
        else:
            context.append((i, sample))
    if not trained and not partial_rollout:
        raise InvalidField("samples", "none that is trainable", "at least one")
    summary = _check_samples(trained, partial_rollout=partial_rollout)
    for i, sample in context:
        _check_sample(i, sample, partial_rollout=partial_rollout, may_lack_spans=True)
        summary.tokens += sample.tokens
    means = [sum(rewards) / len(rewards) for each in by_policy.values() for rewards in each.values()]
    summary.trajectories = len({number for each in by_policy.values() for number in each})
    summary.trajectory_rewards = means
    summary.mean_reward = sum(means) / max(len(means), 1)
    summary.equal_rewards = summary.trajectories > 1 and all(
        len({reward for rewards in each.values() for reward in rewards}) == 1 for each in by_policy.values()
    )
    return summary


def _check_samples(samples: Sequence[tuple[int, pb.Sample]], *, partial_rollout: bool) -> GroupSummary:
    """Check samples, with their indexes."""
    total = total_loss = turns = 0
    by_version: dict[tuple[int, int], int] = {}
    lengths: list[int] = []
    rewards: list[float] = []
    reasons: list[int] = []
    head: tuple[int, int] | None = None
    tail: tuple[int, int] | None = None
    finished = _MAYBE_UNFINISHED if partial_rollout else _FINISHED
    shortest_response, most_tokens = 0 if partial_rollout else 1, limits.MAX_TOKENS
    for i, sample in samples:
        tokens, prompt_len, loss_tokens = sample.tokens, sample.prompt_len, sample.loss_tokens
        response, reward, reason, its_turns = tokens - prompt_len, sample.reward, sample.finish_reason, sample.turns
        spans = sample.spans
        position, version, first = prompt_len, (1, 0), None
        # Of one span, as nearly every sample has it, an iteration costs twice what its fields do.
        for span in spans if len(spans) != 1 else (spans[0],):
            at, end, stamp = span.start, span.end, span.version
            newer = (stamp.term, stamp.version)
            if at != position or end <= at or newer < version:
                position = -1
                break
            position, version = end, newer
            by_version[newer] = by_version.get(newer, 0) + end - at
            first = first or newer
        if (
            position != tokens
            or not 1 <= tokens <= most_tokens
            or response < shortest_response
            or loss_tokens > response
            or not isfinite(reward)
            or reason not in finished
            or its_turns
        ):
            _check_sample(i, sample, partial_rollout=partial_rollout)
        turns += sum([turn.role == "assistant" for turn in its_turns]) if its_turns else 1
        total += tokens
        total_loss += loss_tokens
        lengths.append(response)
        rewards.append(reward)
        reasons.append(reason)
        if first is not None:
            head = first if head is None or first < head else head
            tail = version if tail is None or version > tail else tail
    truncated = reasons.count(pb.FINISH_REASON_LENGTH)
    version_tokens = sum([tokens * number for (_, number), tokens in by_version.items()])
    if version_tokens > limits.MAX_VERSION:
        # Many tokens of a small version, or a version out of bounds.
        for i, sample in samples:
            _check_spans(i, sample.spans, sample.prompt_len, sample.tokens)
    return GroupSummary(
        *(total, total_loss, head, tail, lengths, rewards, version_tokens, by_version, turns, truncated),
        trajectories=len(rewards),
        equal_rewards=len(rewards) > 1 and rewards.count(rewards[0]) == len(rewards),
        mean_reward=sum(rewards) / max(len(rewards), 1),
    )


def _check_sample(i: int, sample: pb.Sample, *, partial_rollout: bool, may_lack_spans: bool = False) -> None:
    tokens, prompt_len, reason = sample.tokens, sample.prompt_len, sample.finish_reason
    if not 1 <= tokens <= limits.MAX_TOKENS:
        raise InvalidField(f"samples[{i}].tokens", tokens, f"1 to {limits.MAX_TOKENS}")
    most = tokens if partial_rollout else tokens - 1
    if prompt_len > most:
        raise InvalidField(f"samples[{i}].prompt_len", prompt_len, f"at most {most} (tokens is {tokens})")
    if sample.loss_tokens > tokens - prompt_len:
        raise InvalidField(
            f"samples[{i}].loss_tokens", sample.loss_tokens, f"at most the {tokens - prompt_len} response tokens"
        )
    if not isfinite(sample.reward):
        raise InvalidField(f"samples[{i}].reward", sample.reward, "finite")
    if reason not in _FINISHED and not (partial_rollout and reason == pb.FINISH_REASON_ABORTED):
        name = pb.FinishReason.Name(reason) if reason in pb.FinishReason.values() else "?"
        limit = "STOP or LENGTH" + (" or ABORTED" if partial_rollout else "")
        raise InvalidField(f"samples[{i}].finish_reason", name, limit)
    if sample.spans or not may_lack_spans:
        _check_spans(i, sample.spans, prompt_len, tokens)
    previous = 0
    for j, turn in enumerate(sample.turns):
        if not previous <= turn.start < turn.end <= tokens:
            raise InvalidField(
                f"samples[{i}].turns[{j}]", f"[{turn.start}, {turn.end})", f"in order and within {tokens} tokens"
            )
        previous = turn.end


def _check_spans(i: int, spans: Iterable[pb.VersionSpan], prompt_len: int, tokens: int) -> None:
    position, newest = prompt_len, (0, 0)
    for j, span in enumerate(spans):
        start, end, version = span.start, span.end, span.version
        if start != position or end <= start:
            raise InvalidField(
                f"samples[{i}].spans[{j}]", f"[{start}, {end})", f"a non-empty span that starts at {position}"
            )
        stated = (version.term, version.version)
        if stated[0] < 1:
            raise InvalidField(f"samples[{i}].spans[{j}].version.term", stated[0], "at least 1")
        if stated[1] > limits.MAX_VERSION:
            raise InvalidField(f"samples[{i}].spans[{j}].version.version", stated[1], f"at most {limits.MAX_VERSION}")
        if stated < newest:
            raise InvalidField(f"samples[{i}].spans[{j}].version", stated, f"not below the span before it, {newest}")
        position, newest = end, stated
    if position != tokens:
        raise InvalidField(
            f"samples[{i}].spans",
            f"spans up to token {position}",
            f"tiling the response, tokens {prompt_len} to {tokens}",
        )


@lru_cache(maxsize=64)
def _checked_columns(samples: int, *columns: bytes) -> tuple[ColumnSpec, ...]:
    """The serialized columns of a group of so many samples, checked. Unless ragged, a run has the same few."""
    if not len(REQUIRED_COLUMNS) <= len(columns) <= limits.MAX_COLUMNS:
        raise InvalidField("columns", f"{len(columns)} columns", f"3 to {limits.MAX_COLUMNS} columns")
    return _checked_together(samples, tuple(_checked_column(i, column) for i, column in enumerate(columns)))


@lru_cache(maxsize=64)
def _checked_added_columns(samples: int, *columns: bytes) -> tuple[ColumnSpec, ...]:
    """The serialized columns that a stage adds to a group of so many samples, checked."""
    if len(columns) > limits.MAX_COLUMNS:
        raise InvalidField("columns", f"{len(columns)} columns", f"at most {limits.MAX_COLUMNS} columns")
    specs = tuple(_checked_column(i, column, required=False) for i, column in enumerate(columns))
    for i, spec in enumerate(specs):
        if spec.name in dict(REQUIRED_COLUMNS):
            raise InvalidField(f"columns[{i}].name", spec.name, "another one: every group has this from its worker")
    return _checked_together(samples, specs)


def _checked_together(samples: int, specs: tuple[ColumnSpec, ...]) -> tuple[ColumnSpec, ...]:
    names: set[str] = set()
    for i, spec in enumerate(specs):
        if spec.axis == pb.AXIS_RAGGED and len(spec.ragged_rows) != samples:
            raise InvalidField(
                f"columns[{i}].rows", f"{len(spec.ragged_rows)} entries", f"one for each of {samples} samples"
            )
        if spec.name in names:
            raise InvalidField(f"columns[{i}].name", spec.name, "unique in the group")
        names.add(spec.name)
    return specs


@lru_cache(maxsize=1024)
def _checked_column(i: int, serialized: bytes, *, required: bool = True) -> ColumnSpec:
    """Column `i` of a group, checked by itself. The groups of a run repeat the same few."""
    column = pb.Column.FromString(serialized)
    at = f"columns[{i}]"
    if required and i < len(REQUIRED_COLUMNS):
        name, dtype = REQUIRED_COLUMNS[i]
        if column.name != name:
            raise InvalidField(f"{at}.name", column.name, repr(name))
        if column.dtype != dtype:
            raise InvalidField(f"{at}.dtype", _dtype_name(column.dtype), f"{_dtype_name(dtype)} for {name}")
        if column.axis != pb.AXIS_TOKEN or column.item_shape:
            raise InvalidField(at, f"item_shape {list(column.item_shape)}", f"a scalar per token for {name}")
    if not limits.COLUMN_NAME.fullmatch(column.name):
        raise InvalidField(f"{at}.name", column.name, "1 to 64 characters of [a-z0-9_]")
    if column.dtype not in NUMPY_DTYPES:
        raise InvalidField(f"{at}.dtype", column.dtype, "one of DType")
    if column.axis not in (pb.AXIS_TOKEN, pb.AXIS_SAMPLE, pb.AXIS_RAGGED):
        raise InvalidField(f"{at}.axis", column.axis, "AXIS_TOKEN, AXIS_SAMPLE or AXIS_RAGGED")
    if len(column.item_shape) > limits.MAX_ITEM_DIMENSIONS or prod(column.item_shape) > 1 << 30:
        raise InvalidField(f"{at}.item_shape", list(column.item_shape), "at most 4 dimensions and 2^30 items")
    return column_spec(serialized)


def _dtype_name(dtype: int) -> str:
    return pb.DType.Name(dtype).removeprefix("D_TYPE_").lower() if dtype in pb.DType.values() else str(dtype)  # type: ignore[arg-type]
