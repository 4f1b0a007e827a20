"""vLLM's JSON for /v1/completions: request bodies from SampleRequests, and what its choices say. Pure functions.

What vLLM documents, and what follows for this file:
- `logprobs` are those of the draw only under --logprobs-mode processed_logprobs. Then they are taken after penalties,
  temperature, top-k, top-p and min-p. Greedy reports those at temperature 1, while its choice is certain: answer.py
  makes them 0.
- `return_token_ids` brings the token ids, in a stream those that are new. A stop token is the last of them.
- Completions name no weights. So no request may live through a load: the worker pauses with `abort` alone.
- Sampling masks come with /inference/v1/generate alone, not here.
- Seeded randomness starts anew with each request, and does not go by a token's position. Seeds are not sent.
- A temperature between 0 and 0.01 is raised to 0.01, without a word in the answer.
"""

from typing import Any

from buffer_wire.engine_columns import SAMPLING_MASK
from buffer_wire.errors import InvalidField
from rollout_workers.engine.types import SampleRequest

LEAST_TEMPERATURE = 0.01
"""Least temperature above 0 that vLLM draws with."""


def check_sampling(request: SampleRequest, vocab_size: int) -> None:
    """Raise InvalidField for sampling that vLLM does in another way than asked, or of which it cannot tell enough."""
    if 0 < request.temperature < LEAST_TEMPERATURE:
        limit = f"0, or at least {LEAST_TEMPERATURE}, to which vLLM raises what is less"
        raise InvalidField("temperature", request.temperature, limit)
    if request.images:
        raise InvalidField("images", f"{len(request.images)} images", "none: nobody has asked vLLM for them yet")
    for name in request.columns:
        if name != SAMPLING_MASK:
            raise InvalidField("columns", name, f"{SAMPLING_MASK}: nobody has asked a vLLM server for others yet")
    narrowed = request.top_p < 1 or 0 < request.top_k < vocab_size or request.min_p > 0 or request.temperature == 0
    if narrowed and SAMPLING_MASK in request.columns:
        limit = "not asked for with top_p, top_k, min_p or greedy: vLLM's completions have no sampling masks"
        raise InvalidField("columns", SAMPLING_MASK, limit)


def completion_body(
    request: SampleRequest, *, model: str, cache_salt: str, stream_interval: int | None
) -> dict[str, Any]:
    """Body of one /v1/completions call.

    `cache_salt` separates prefix caches: only requests of the same salt share one. `stream_interval` asks for a stream
    with an event for every so many tokens.
    """
    body: dict[str, Any] = {
        "model": model,
        "request_id": request.rid,
        "prompt": request.input_ids.tolist(),
        "max_tokens": request.max_new_tokens,
        "min_tokens": request.min_new_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "stop": list(request.stop),
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": request.ignore_eos,
        "skip_special_tokens": False,
        "logprobs": 0,  # of the token that was drawn, and of no others
        "return_token_ids": True,
        "cache_salt": cache_salt,
        "stream": stream_interval is not None,
    }
    if stream_interval is not None:
        body["stream_interval"] = stream_interval
        body["stream_options"] = {"include_usage": True}
    return body


def external_id(rid: str) -> str:
    """Name under which the server knows the request, and aborts it: of the one prompt of its completion."""
    return f"cmpl-{rid}-0"
