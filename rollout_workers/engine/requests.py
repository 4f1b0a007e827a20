"""The bounds of a SampleRequest, checked before an engine sees it; and the answers to those that came to nothing.

A server must not be trusted to check them: a token id beyond the vocabulary ends the whole SGLang process, with every
request in it. So nothing leaves the worker unchecked, and the error names the field and the limit.
"""

from collections.abc import Sequence
from math import isfinite

import numpy as np

from buffer_wire import engine_columns
from buffer_wire.errors import InvalidField
from rollout_workers.engine.token_rows import none_of
from rollout_workers.engine.types import RID_LENGTH, EngineInfo, GeneratedSample, SampleRequest


def check_requests(requests: Sequence[SampleRequest], info: EngineInfo) -> None:
    """Raise InvalidField for the first request that `info`'s engine must not be sent."""
    rids = [request.rid for request in requests]
    if len(set(rids)) != len(rids):
        raise InvalidField("rid", f"{len(rids) - len(set(rids))} repeated", "unique within one call")
    for request in requests:
        _check_tokens(request, info)
        _check_sampling(request)
        for name in request.columns:
            if not engine_columns.names_of(name):
                raise InvalidField("columns", name, f"{engine_columns.KNOWN}: a newer worker may have it")
        if len(request.rid) != RID_LENGTH:
            raise InvalidField("rid", request.rid, f"{RID_LENGTH} characters, as new_rid() makes them")


def _check_tokens(request: SampleRequest, info: EngineInfo) -> None:
    ids = request.input_ids
    if ids.dtype != np.int32 or ids.ndim != 1:
        raise InvalidField("input_ids", f"{ids.dtype} {ids.shape}", "an int32 array of one dimension")
    if not 1 <= len(ids) <= info.max_input_tokens:
        raise InvalidField("input_ids", f"{len(ids)} tokens", f"1 to {info.max_input_tokens} tokens")
    for extreme in (int(ids.min()), int(ids.max())):
        if not 0 <= extreme < info.vocab_size:
            raise InvalidField("input_ids", f"token id {extreme}", f"token ids of 0 to {info.vocab_size - 1}")
    room = info.context_length - len(ids)
    if not 1 <= request.max_new_tokens <= room:
        raise InvalidField("max_new_tokens", request.max_new_tokens, f"1 to {room} after {len(ids)} input tokens")
    for token in request.stop_token_ids:
        if not 0 <= token < info.vocab_size:
            raise InvalidField("stop_token_ids", token, f"0 to {info.vocab_size - 1}")


def _check_sampling(request: SampleRequest) -> None:
    if not (isfinite(request.temperature) and request.temperature >= 0):
        raise InvalidField("temperature", request.temperature, "a finite number of at least 0")
    if not 0 < request.top_p <= 1:
        raise InvalidField("top_p", request.top_p, "above 0 and at most 1")
    if request.top_k < 0:
        raise InvalidField("top_k", request.top_k, "at least 0 (0 is off)")
    if not 0 <= request.min_p <= 1:
        raise InvalidField("min_p", request.min_p, "0 to 1")
    if not 0 < request.repetition_penalty <= 2:
        raise InvalidField("repetition_penalty", request.repetition_penalty, "above 0 and at most 2")
    if not 0 <= request.min_new_tokens <= request.max_new_tokens:
        raise InvalidField("min_new_tokens", request.min_new_tokens, f"0 to {request.max_new_tokens}")


def never_ran(request: SampleRequest) -> GeneratedSample:
    """The answer to a request that was given up before an engine had begun with it."""
    return _without_tokens(request, aborted_in_queue=True)


def unusable(request: SampleRequest, fault: str, *, received: int = 0) -> GeneratedSample:
    """The answer to a request to which the engine gave none that can be used, though it sent `received` tokens."""
    return _without_tokens(request, fault=fault, received=received)


def _without_tokens(
    request: SampleRequest, *, aborted_in_queue: bool = False, fault: str = "", received: int = 0
) -> GeneratedSample:
    return GeneratedSample(
        rid=request.rid,
        sample_index=request.sample_index,
        output_ids=np.empty(0, dtype=np.int32),
        logprobs=np.empty(0, dtype=np.float32),
        spans=(),
        finish_reason="abort",
        columns={name: none_of(name, start=request.experts_from) for name in request.columns},
        aborted_in_queue=aborted_in_queue,
        fault=fault,
        unusable_tokens=received,
    )
