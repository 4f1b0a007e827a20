"""Bounds of groups, checked from header and payload length alone. Both ends use it: a client before it sends, the
service before anything is written.

Raises InvalidField naming the field (`samples[3].spans[0].start`), the value's shape and the limit.
"""

from math import isfinite, prod

from buffer_wire import limits
from buffer_wire.errors import InvalidField
from buffer_wire.layout import NUMPY_DTYPES, REQUIRED_COLUMNS, payload_bytes
from rollout_buffer.v1 import groups_pb2 as pb

_FINISHED = (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH)


def check_group(header: pb.GroupHeader, payload_len: int, *, continuation: bool = False) -> None:
    """Check a group, or a continuation (whose samples may be unfinished or empty). `payload_len` in bytes."""
    if not limits.TASK_ID.fullmatch(header.task_id):
        raise InvalidField("task_id", header.task_id, "1 to 128 characters of [A-Za-z0-9._:-]")
    if len(header.environment) > 64:
        raise InvalidField("environment", header.environment, "at most 64 characters")
    if len(header.worker_id) > 128:
        raise InvalidField("worker_id", header.worker_id, "at most 128 characters")
    if len(header.metadata_json) > limits.MAX_METADATA_BYTES:
        raise InvalidField(
            "metadata_json", f"{len(header.metadata_json)} characters", f"at most {limits.MAX_METADATA_BYTES}"
        )
    if not 1 <= len(header.samples) <= limits.MAX_SAMPLES:
        raise InvalidField("samples", f"{len(header.samples)} samples", f"1 to {limits.MAX_SAMPLES} samples")
    for i, sample in enumerate(header.samples):
        _check_sample(f"samples[{i}]", sample, continuation=continuation)
    _check_columns(header)
    expected = payload_bytes(header)
    if payload_len != expected:
        raise InvalidField(
            "payload",
            f"{payload_len} bytes",
            f"the {expected} bytes that its {len(header.columns)} columns take",
        )


def _check_sample(at: str, sample: pb.Sample, *, continuation: bool) -> None:
    if not 1 <= sample.tokens <= limits.MAX_TOKENS:
        raise InvalidField(f"{at}.tokens", sample.tokens, f"1 to {limits.MAX_TOKENS}")
    most = sample.tokens if continuation else sample.tokens - 1
    if sample.prompt_len > most:
        raise InvalidField(f"{at}.prompt_len", sample.prompt_len, f"at most {most} (tokens is {sample.tokens})")
    if sample.loss_tokens > sample.tokens - sample.prompt_len:
        raise InvalidField(
            f"{at}.loss_tokens",
            sample.loss_tokens,
            f"at most the {sample.tokens - sample.prompt_len} response tokens",
        )
    if not isfinite(sample.reward):
        raise InvalidField(f"{at}.reward", sample.reward, "finite")
    if sample.finish_reason not in _FINISHED and not (
        continuation and sample.finish_reason == pb.FINISH_REASON_ABORTED
    ):
        name = pb.FinishReason.Name(sample.finish_reason) if sample.finish_reason in pb.FinishReason.values() else "?"
        raise InvalidField(f"{at}.finish_reason", name, "STOP or LENGTH" + (" or ABORTED" if continuation else ""))
    _check_spans(at, sample)
    previous = 0
    for j, turn in enumerate(sample.turns):
        if not previous <= turn.start < turn.end <= sample.tokens:
            raise InvalidField(
                f"{at}.turns[{j}]",
                f"[{turn.start}, {turn.end})",
                f"in order and within {sample.tokens} tokens",
            )
        previous = turn.end


def _check_spans(at: str, sample: pb.Sample) -> None:
    position, newest = sample.prompt_len, (0, 0)
    for j, span in enumerate(sample.spans):
        if span.start != position or span.end <= span.start:
            raise InvalidField(
                f"{at}.spans[{j}]",
                f"[{span.start}, {span.end})",
                f"a non-empty span that starts at {position}",
            )
        if span.version.epoch < 1:
            raise InvalidField(f"{at}.spans[{j}].version.epoch", span.version.epoch, "at least 1")
        version = (span.version.epoch, span.version.version)
        if version < newest:
            raise InvalidField(f"{at}.spans[{j}].version", version, f"not below the span before it, {newest}")
        position, newest = span.end, version
    if position != sample.tokens:
        raise InvalidField(
            f"{at}.spans",
            f"spans up to token {position}",
            f"tiling the response, tokens {sample.prompt_len} to {sample.tokens}",
        )


def _check_columns(header: pb.GroupHeader) -> None:
    columns = header.columns
    if not len(REQUIRED_COLUMNS) <= len(columns) <= limits.MAX_COLUMNS:
        raise InvalidField("columns", f"{len(columns)} columns", f"3 to {limits.MAX_COLUMNS} columns")
    for i, (name, dtype) in enumerate(REQUIRED_COLUMNS):
        column = columns[i]
        if column.name != name:
            raise InvalidField(f"columns[{i}].name", column.name, repr(name))
        if column.dtype != dtype:
            raise InvalidField(f"columns[{i}].dtype", _dtype_name(column.dtype), f"{_dtype_name(dtype)} for {name}")
        if column.axis != pb.AXIS_TOKEN or column.item_shape:
            raise InvalidField(
                f"columns[{i}]", f"item_shape {list(column.item_shape)}", f"a scalar per token for {name}"
            )
    seen: set[str] = set()
    for i, column in enumerate(columns):
        at = f"columns[{i}]"
        if not limits.COLUMN_NAME.fullmatch(column.name) or column.name in seen:
            raise InvalidField(f"{at}.name", column.name, "1 to 64 characters of [a-z0-9_], unique in the group")
        seen.add(column.name)
        if column.dtype not in NUMPY_DTYPES:
            raise InvalidField(f"{at}.dtype", column.dtype, "one of DType")
        if column.axis not in (pb.AXIS_TOKEN, pb.AXIS_SAMPLE, pb.AXIS_RAGGED):
            raise InvalidField(f"{at}.axis", column.axis, "AXIS_TOKEN, AXIS_SAMPLE or AXIS_RAGGED")
        if len(column.item_shape) > limits.MAX_ITEM_DIMENSIONS or prod(column.item_shape) > 1 << 30:
            raise InvalidField(f"{at}.item_shape", list(column.item_shape), "at most 4 dimensions and 2^30 items")
        if column.axis == pb.AXIS_RAGGED and len(column.rows) != len(header.samples):
            raise InvalidField(
                f"{at}.rows", f"{len(column.rows)} entries", f"one for each of {len(header.samples)} samples"
            )


def _dtype_name(dtype: int) -> str:
    return pb.DType.Name(dtype).removeprefix("D_TYPE_").lower() if dtype in pb.DType.values() else str(dtype)  # type: ignore[arg-type]
