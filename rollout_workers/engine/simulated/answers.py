"""Answers of the simulated engine: tokens, log-probabilities and lengths that depend on the request alone."""

import zlib
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from buffer_wire import engine_columns
from buffer_wire.errors import InvalidField
from rollout_workers.engine.token_rows import EngineColumn, PositionRows, TokenRows, TokenValues
from rollout_workers.engine.types import FinishReason, SampleRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """Distribution of the answers."""

    length_median: float = 64.0
    """Median of the answers' lengths in tokens; they are lognormal, and capped by max_new_tokens."""
    length_sigma: float = 0.5
    """Standard deviation of the logarithm of the lengths; 0 makes all of them equal."""
    vocab_size: int = 1_024
    """Size of the vocabulary: token ids are uniform in [0, vocab_size)."""
    seed: int = 0
    prompt_tokens: int = 0
    """Tokens of every prompt: a partial rollout then goes on as it would have. 0: what is left of it is drawn anew."""

    def __post_init__(self) -> None:
        if not (isfinite(self.length_median) and self.length_median >= 1):
            raise InvalidField("length_median", self.length_median, "a finite number of at least 1")
        if not 0 <= self.length_sigma <= 10:
            raise InvalidField("length_sigma", self.length_sigma, "0 to 10")
        if not 2 <= self.vocab_size <= 1 << 31:
            raise InvalidField("vocab_size", self.vocab_size, "2 to 2^31")


@dataclass(frozen=True, slots=True)
class Answer:
    """Complete answer to a request; an interrupted sample is a prefix of it."""

    tokens: npt.NDArray[np.int32]
    """Token ids, int32 [t], t >= 1."""
    logprobs: npt.NDArray[np.float32]
    """Log-probabilities, float32 [t]: the log of a uniform number in (0, 1]."""
    finish_reason: FinishReason


EXPERT_LAYERS, EXPERTS_PER_TOKEN, EXPERTS = 2, 2, 8
"""Shape of the routing that is simulated."""


def columns_of(
    request: SampleRequest, tokens: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32], vocab_size: int
) -> dict[str, EngineColumn]:
    """Columns of the answer's first tokens: functions of the tokens alone, wherever a sample was interrupted."""
    made: dict[str, EngineColumn] = {}
    for name in request.columns:
        if name == engine_columns.SAMPLING_MASK:
            made[name] = mask_of(request, tokens, vocab_size)
        elif name == engine_columns.ENTROPY:
            made[name] = TokenValues({name: (tokens % 7 / np.float32(8)).astype(np.float32)})
        elif name == engine_columns.ROUTED_EXPERTS:
            inputs = np.concatenate([request.input_ids, tokens])[request.experts_from : -1]
            made[name] = PositionRows(request.experts_from, experts_of(inputs))
        elif top := engine_columns.top_of(name):
            ranks = np.arange(top, dtype=np.int32)
            made[name] = TokenValues(
                {
                    engine_columns.TOP_LOGPROBS: logprobs[:, np.newaxis] - ranks.astype(np.float32),
                    engine_columns.TOP_IDS: (tokens[:, np.newaxis] + ranks) % np.int32(vocab_size),
                }
            )
    return made


def experts_of(inputs: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.uint8]:
    """Experts to which inputs int32 [n] are routed, [n, layers, k]."""
    layers, ranks = np.ogrid[:EXPERT_LAYERS, :EXPERTS_PER_TOKEN]
    routed: npt.NDArray[np.uint8] = ((inputs[:, np.newaxis, np.newaxis] + 3 * layers + ranks) % EXPERTS).astype(
        np.uint8
    )
    return routed


def mask_of(request: SampleRequest, tokens: npt.NDArray[np.int32], vocab_size: int) -> TokenRows:
    """The token ids that could be drawn in each token's place: itself and up to three next ones, where sampling is
    narrowed.
    """
    if request.temperature > 0 and request.top_p == 1 and not request.top_k and not request.min_p:
        return TokenRows.none_for(len(tokens))
    return TokenRows.of([[(t + i) % vocab_size for i in range(min(1 + t % 4, vocab_size))] for t in tokens.tolist()])


def answer_to(request: SampleRequest, options: AnswerOptions) -> Answer:
    """The answer to `request`: a function of the options' seed, input_ids, seed or else sample_index, the bounds of
    the length, and stop_token_ids. The other sampling parameters mean nothing without a model.

    Without `prompt_tokens` a partial rollout is a request of its own: how long the interrupted answer was to be is not
    in its input_ids, so its remaining length is drawn anew.
    """
    begun = len(request.input_ids) - options.prompt_tokens if options.prompt_tokens else 0
    digest = zlib.crc32(request.input_ids[: len(request.input_ids) - begun].tobytes())
    own = [request.sample_index] if request.seed is None else [request.seed, 1]
    rng = np.random.default_rng([options.seed, digest, *own])
    drawn = round(options.length_median * float(np.exp(options.length_sigma * rng.standard_normal())))
    length = min(max(1, request.min_new_tokens, drawn - begun), request.max_new_tokens)
    tokens = rng.integers(options.vocab_size, size=begun + length, dtype=np.int32)[begun:]
    if request.images:
        # Placeholders are never drawn: another token comes in their place.
        places = {int(request.input_ids[image.start]) for image in request.images}
        free = next(token for token in range(options.vocab_size) if token not in places)
        tokens[np.isin(tokens, list(places))] = free
    logprobs = np.log1p(-rng.random(begun + length)).astype(np.float32)[begun:]
    may_stop = tokens[request.min_new_tokens :]
    if request.stop_token_ids and len(stops := np.flatnonzero(np.isin(may_stop, request.stop_token_ids))):
        end = request.min_new_tokens + int(stops[0]) + 1
        return Answer(tokens[:end], logprobs[:end], "stop")
    return Answer(tokens, logprobs, "length" if drawn - begun > request.max_new_tokens else "stop")
