"""Columns in SGLang's answers: what is asked for, and what is made of lists by token and of routed experts.

What SGLang 0.5.23 does, and what follows for this file:
- Lists have an entry a token, and come with their tokens, like log-probabilities.
- `output_top_logprobs` has [log-probability, id, text] of the K likeliest tokens, after temperature, before top-k,
  top-p and min-p.
- It answers no request for the entropy. With `sampling_logprobs_mode: support` the log-probabilities of all tokens that
  could be drawn come in place of the drawn one's: both are made of them.
- `routed_experts` is in a request's last event alone: base64 of int32 [rows, layers, k] for the inputs from
  `routed_experts_start_len` (one number for the whole batch) to the token before the last. Rows of inputs in the prefix
  cache are those of when they were computed. A request that is aborted while it waits or is retracted brings none.
- The rows are as many bytes as four of a narrowed column, a third more in base64: they are decoded piece by piece, out
  of the event, before it is parsed.
"""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from buffer_wire.engine_columns import ENTROPY, ROUTED_EXPERTS, SAMPLING_MASK, TOP_IDS, TOP_LOGPROBS, top_of
from rollout_workers.engine.token_rows import Array, EngineColumn, PositionRows, TokenRows, TokenValues
from rollout_workers.engine.types import SampleRequest

MASK = "output_token_sampling_mask"
DRAWN = "output_token_sampling_logprobs"
PLAIN = "output_token_logprobs"
TOP = "output_top_logprobs"

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Names of the number of experts in config.json."""

_PIECE = 1 << 20
"""Characters of base64 that are decoded at a time: a multiple of 16, so that they are whole numbers of 4 bytes."""

EXPERTS = b'"routed_experts":"'
"""Beginning of routed experts in an event; SGLang writes no space there. A request without any has none, or null."""


class Malformed(ValueError):
    """A reply that breaks SGLang's contract."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Shape of a model's routing, by its config.json."""

    layers: int
    top_k: int
    experts: int

    @property
    def dtype(self) -> type[np.generic]:
        """Narrowest dtype of an expert's id that every library has: the same for all groups of a model."""
        return np.uint8 if self.experts <= 1 << 8 else np.int16


def expert_shape(places: Sequence[Path]) -> ExpertShape | str:
    """The shape of the model's routing by the first config.json in these places, or why it is not known."""
    path = next((found for place in places if (found := place / "config.json").exists()), None)
    if path is None:
        return f"no config.json in {' or '.join(map(str, places))}; --tokenizer names another directory of the model"
    try:
        config = json.loads(path.read_bytes())
        config = config.get("text_config", config)
        experts = next((config[name] for name in _EXPERTS if config.get(name)), None)
        if experts is None:
            return f"{path} names no experts"
        return ExpertShape(int(config["num_hidden_layers"]), int(config["num_experts_per_tok"]), int(experts))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{path} tells no layers and experts ({type(error).__name__}: {error})"


def lists_of(request: SampleRequest, *, narrowed: bool) -> tuple[str, ...]:
    """Names in meta_info of the lists that are wanted of this request, the drawn log-probabilities' first."""
    drawn = (DRAWN,) if narrowed else (PLAIN,)
    mask = (MASK,) if narrowed and (SAMPLING_MASK in request.columns or ENTROPY in request.columns) else ()
    return (*drawn, *mask, *((TOP,) if any(map(top_of, request.columns)) else ()))


def entries_of(meta: Mapping[str, Any], name: str, start: int = 0, end: int | None = None) -> Sequence[Any]:
    """Entries of a list in meta_info, from `start` to `end`; of plain log-probabilities the numbers alone."""
    entries: Sequence[Any] = (meta.get(name) or ())[start:end]
    return [entry[0] for entry in entries] if name == PLAIN else entries


def drawn_of(
    request: SampleRequest, ids: Sequence[int], lists: Mapping[str, Sequence[Any]]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None]:
    """Log-probabilities of the draw, and the draw's entropies where they are wanted. Raises ValueError, TypeError."""
    if PLAIN in lists:
        return np.asarray(lists[PLAIN], np.float32), None
    drawn = lists[DRAWN]
    if ENTROPY not in request.columns:
        return np.asarray(drawn, np.float32), None
    logprobs, entropies = [], []
    # More of one list than of another is seen by whoever compares lengths.
    for token, kept, support in zip(ids, lists[MASK], drawn, strict=False):
        every = np.asarray(support, np.float64)
        if every.shape != (len(kept),):
            raise Malformed(
                f"log-probabilities of shape {list(every.shape)} for {len(kept)} tokens that could be drawn"
            )
        logprobs.append(every[kept.index(token)])
        # A log-probability of -inf is a token that cannot be drawn: 0 log 0 is 0.
        entropies.append(-np.sum(np.exp(every) * np.where(np.isneginf(every), 0, every)))
    return np.asarray(logprobs, np.float32), np.asarray(entropies, np.float32)


def columns_of(
    request: SampleRequest,
    ids: npt.NDArray[np.int32],
    lists: Mapping[str, Sequence[Any]],
    entropies: npt.NDArray[np.float32] | None,
    experts: Array | None,
    *,
    finished: bool,
) -> dict[str, EngineColumn]:
    """The columns of these tokens, by the names that they were asked for. Raises one of wire.ODD."""
    made: dict[str, EngineColumn] = {}
    for name in request.columns:
        if name == SAMPLING_MASK:
            made[name] = _mask(ids, lists.get(MASK))
        elif name == ENTROPY:
            made[name] = TokenValues({name: np.empty(0, np.float32) if entropies is None else entropies[: len(ids)]})
        elif name == ROUTED_EXPERTS:
            made[name] = _positions(request, len(ids), experts, finished=finished)
        elif top := top_of(name):
            made[name] = _top(lists[TOP][: len(ids)], len(ids), top)
    return made


def _mask(ids: npt.NDArray[np.int32], masks: Sequence[Sequence[int]] | None) -> TokenRows:
    if masks is None:
        return TokenRows.none_for(len(ids))
    kept = masks[: len(ids)]
    if len(kept) != len(ids):
        raise Malformed(f"{len(kept)} sampling masks for {len(ids)} tokens")
    rows = TokenRows.of(kept)
    if not rows.holds(ids):
        raise Malformed("a token that its own sampling mask excludes")
    return rows


def _top(entries: Sequence[Sequence[Sequence[Any]]], tokens: int, top: int) -> TokenValues:
    flat = [pair for entry in entries for pair in entry]
    if len(entries) != tokens or len(flat) != tokens * top or any(len(entry) != top for entry in entries):
        raise Malformed(f"{len(flat)} likeliest tokens for {tokens} tokens, of {top} each")
    logprobs = np.fromiter((pair[0] for pair in flat), np.float32, len(flat))
    ids = np.fromiter((pair[1] for pair in flat), np.int32, len(flat))
    return TokenValues({TOP_LOGPROBS: logprobs.reshape(tokens, top), TOP_IDS: ids.reshape(tokens, top)})


def _positions(request: SampleRequest, tokens: int, experts: Array | None, *, finished: bool) -> PositionRows:
    due = len(request.input_ids) + tokens - 1 - request.experts_from
    if experts is None:
        if finished:
            raise Malformed("no routed experts: was the server started with --enable-return-routed-experts?")
        return PositionRows(request.experts_from, np.empty((0, 0, 0), np.uint8))
    rows = experts[: max(due, 0)]
    if finished and len(experts) != due:
        raise Malformed(f"routed experts of {len(experts)} inputs, and {due} are due")
    return PositionRows(request.experts_from, rows)


def first_position(requests: Sequence[SampleRequest]) -> int | None:
    """The position from which a batch's routed experts are asked for; None where nobody wants any."""
    return min((request.experts_from for request in requests if ROUTED_EXPERTS in request.columns), default=None)


def decoded(text: memoryview, shape: ExpertShape) -> Array:
    """Routed experts [rows, layers, k] of base64. Raises Malformed."""
    count = 3 * len(text) // 4 - bytes(text[-2:]).count(b"=")
    row = 4 * shape.layers * shape.top_k
    if count % row:
        raise Malformed(f"{count} bytes of routed experts, no multiple of {shape.layers} layers times {shape.top_k}")
    out = np.empty(count // 4, shape.dtype)
    at = 0
    try:
        for piece in range(0, len(text), _PIECE):
            ids = np.frombuffer(binascii.a2b_base64(text[piece : piece + _PIECE]), "<i4")
            if len(ids) and not 0 <= ids.min() <= ids.max() < shape.experts:
                raise Malformed(f"experts {ids.min()} to {ids.max()} of {shape.experts}")
            out[at : at + len(ids)] = ids
            at += len(ids)
    except binascii.Error as error:
        raise Malformed(f"routed experts that are no base64: {error}") from error
    if at != len(out):
        raise Malformed(f"{at} numbers of routed experts where {len(out)} were due")
    return out.reshape(-1, shape.layers, shape.top_k)


def experts_of(meta: Mapping[str, Any], shape: ExpertShape | None) -> Array | None:
    """The routed experts of an answer that came whole. Raises ValueError."""
    text = meta.get(ROUTED_EXPERTS)
    return None if text is None or shape is None else decoded(memoryview(text.encode()), shape)


def encoded(rows: npt.NDArray[np.integer[Any]]) -> str:
    """The inverse of `decoded`, as SGLang writes it; for stubs."""
    return base64.b64encode(rows.astype("<i4").tobytes()).decode()
