"""SGLang's JSON for /generate: request bodies from SampleRequests, GeneratedSamples from replies. Pure functions.

What SGLang 0.5.23 does, and what follows for this file:
- `output_token_logprobs` are taken after temperature but before top-k, top-p and min-p. The log-probability with which
  a token was really drawn is in `output_token_sampling_logprobs`, which comes with `return_sampling_mask`; that in turn
  wants a finite top_k, at most the server's --sampling-mask-max-tokens.
- Greedy (temperature 0) reports the model's log-probability at temperature 1, while its choice is certain: it is asked
  for with the mask too, and reports 0. What else a task wants of an answer is in columns.py.
- `weight_version` is the one at the request's end and would hide every older token; `weight_versions` has the exact
  spans. Of a request under an adapter they name the weights below it.
- The stop token is the last of `output_ids`, with its log-probability.
- A request that is aborted before it runs, or while it is retracted, answers with what had left the scheduler so far.
  That is every 50th token at best, so often nothing; it comes without mask log-probabilities.
- A prompt with images has one placeholder token for each in `input_ids`, and the images in `image_data`, as names of
  files or as data URLs. The server expands the placeholders, and keeps the other ids (SGLANG_MM_AVOID_RETOKENIZE).
  Where it cannot, as for ids that are expanded already, it tokenizes anew with a warning alone: `prompt_tokens` tells.
- What the model makes of an image is kept by the image's hash, and no load of weights ends that. So `mm_hashes` names
  it by weights too. A request that lives through a load still gets what older weights made, unless the server keeps
  nothing (SGLANG_VLM_CACHE_SIZE_MB=0).
- Requests of one batch come back in their order; one that is refused takes the whole batch with it.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any, Literal
from urllib.parse import quote

import numpy as np

from buffer_wire.engine_columns import ENTROPY, ROUTED_EXPERTS, top_of
from buffer_wire.errors import InvalidField
from rollout_workers.engine.requests import unusable
from rollout_workers.engine.sglang.generation.columns import (
    ExpertShape,
    Malformed,
    columns_of,
    drawn_of,
    entries_of,
    experts_of,
    first_position,
    lists_of,
)
from rollout_workers.engine.token_rows import Array
from rollout_workers.engine.types import FinishReason, GeneratedSample, PromptImage, SampleRequest, VersionSpan

MASK_TOKENS_DEFAULT = 4096
"""SGLang's default of --sampling-mask-max-tokens."""

SPECULATIVE_ADVICE = (
    "leave top_p, top_k and min_p of tasks at their defaults, or start the server without --speculative-algorithm, or "
    "with DFLASH or DSPARK, which report them for top_p and top_k"
)

CUMULATIVE_EVENTS = 16
"""Maximum events of one sample where each repeats all that came before: eight times the bytes of a plain answer."""

_BEYOND: dict[str, dict[str, float]] = {
    "all": {},
    "no min_p": {"min_p": 0},
    "none": {"top_p": 1, "top_k": 0, "min_p": 0, "temperature": 1},
}
"""Sampling that a server without masks cannot do, and where it is off. Greedy wants a mask too."""

NEVER_DRAWN = -1e9
"""Bias of the logit of a token that is not to be drawn."""

ABORTED_IN_QUEUE = "Abort in waiting queue"

_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


ODD = (KeyError, TypeError, IndexError, AttributeError, ValueError, OverflowError)
"""Errors that reading an answer of another form can raise, Malformed among them."""


def fault_of(error: BaseException) -> str:
    """Reason why an answer could not be read."""
    return str(error) if isinstance(error, Malformed) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of a server on which its requests and answers depend."""

    vocab_size: int
    mask_max_tokens: int = MASK_TOKENS_DEFAULT
    incremental: bool = False
    """True if its streams send only what is new."""
    speculative: str = ""
    """Speculative decoding that the server uses; empty: none."""
    masks: Literal["all", "no min_p", "none"] = "all"
    """Narrowed sampling for which the server reports masks, and with them the log-probabilities of the draw."""
    experts: ExpertShape | None = None
    """Shape of the routed experts that the server reports; None: it reports none."""
    images: bool = False
    """True if the server's model takes images."""
    sees_files: bool = False
    """True if the server sees this worker's files."""
    no_experts: str = "the server was started without --enable-return-routed-experts"
    """Reason why it reports none."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """Adapter under which the requests of a call run from their start to their end."""

    label: str
    """Label of the adapter, which is its name at the server."""
    base: str
    """Label of the weights below it."""

    def asked(self, requests: Sequence[SampleRequest]) -> dict[str, Any]:
        """Fields of a body with which these requests run under it."""
        return {"lora_path": [self.label] * len(requests)}

    def spans(self, meta: dict[str, Any], length: int) -> tuple[VersionSpan, ...]:
        """Span over [0, length). Raises Malformed where other weights than the base were below the adapter."""
        below = {str(span["version"]) for span in meta.get("weight_versions") or ()}
        if below - {self.base}:
            raise Malformed(f"adapter {self.label} on weights {sorted(below)}, and it goes onto {self.base}")
        return (VersionSpan(self.label, 0, length),) if length else ()


def check_sampling(request: SampleRequest, settings: ServerSettings) -> None:
    """Raise InvalidField for sampling of which the server could not report the log-probabilities of the draw, and for
    columns that it cannot report.
    """
    if request.images and not settings.images:
        raise InvalidField("images", f"{len(request.images)} images", "none: the server's model takes no images")
    if ROUTED_EXPERTS in request.columns and settings.experts is None:
        raise InvalidField("columns", ROUTED_EXPERTS, f"what this server reports: {settings.no_experts}")
    if not with_mask(request, settings.vocab_size):
        return
    if settings.masks == "none" and ENTROPY in request.columns:
        limit = f"not asked of a server with --speculative-algorithm {settings.speculative}"
        raise InvalidField("columns", ENTROPY, f"{limit}, where SGLang reports no sampling masks")
    for name, off in _BEYOND[settings.masks].items():
        if (value := getattr(request, name)) != off:
            limit = f"{off:g} under --speculative-algorithm {settings.speculative}"
            raise InvalidField(name, value, f"{limit}, where SGLang reports no sampling masks: {SPECULATIVE_ADVICE}")
    if request.temperature > 0:
        _top_k_for_mask(request, settings)


def generate_body(
    requests: Sequence[SampleRequest],
    *,
    settings: ServerSettings,
    cache_keys: Sequence[str],
    stream_interval: int | None = None,
    cumulative: bool = False,
) -> dict[str, Any]:
    """The body of one batched /generate call.

    `cache_keys` separate prefix caches: only requests of the same key share one. `stream_interval` asks for a stream
    with an event for every so many tokens of a sample; where events are `cumulative`, at most CUMULATIVE_EVENTS, so
    that what is sent again stays in proportion.
    Raises InvalidField as `check_sampling` does.
    """
    sampling: list[dict[str, Any]] = []
    masks: list[bool] = []
    for request in requests:
        check_sampling(request, settings)
        top_k = _effective_top_k(request, settings.vocab_size)
        narrowed = with_mask(request, settings.vocab_size)
        if narrowed and request.temperature > 0:
            top_k = _top_k_for_mask(request, settings)
        parameters: dict[str, Any] = {
            "max_new_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": top_k or -1,
            "min_p": request.min_p,
            "ignore_eos": request.ignore_eos,
        }
        if request.images:
            parameters["logit_bias"] = {str(place): NEVER_DRAWN for place in _placeholders(request)}
        if request.repetition_penalty != 1:
            parameters["repetition_penalty"] = request.repetition_penalty
        if request.min_new_tokens:
            parameters["min_new_tokens"] = request.min_new_tokens
        if request.seed is not None:
            parameters["sampling_seed"] = request.seed
        if request.stop:
            parameters["stop"] = list(request.stop)
        if request.stop_token_ids:
            parameters["stop_token_ids"] = list(request.stop_token_ids)
        if stream_interval is not None:
            fewest = -(-request.max_new_tokens // CUMULATIVE_EVENTS) if cumulative else 1
            parameters["stream_interval"] = max(stream_interval, fewest)
        sampling.append(parameters)
        masks.append(narrowed)
    return {
        **_more(requests),
        **_images(requests, settings, cache_keys),
        "rid": [request.rid for request in requests],
        "input_ids": [_input_ids(request) for request in requests],
        "sampling_params": sampling,
        "return_logprob": True,
        "return_sampling_mask": masks if any(masks) else False,
        "extra_key": list(cache_keys),
        "stream": stream_interval is not None,
    }


def _more(requests: Sequence[SampleRequest]) -> dict[str, Any]:
    """Fields of the body that are there only where a request needs them."""
    more: dict[str, Any] = {}
    if any(ENTROPY in request.columns for request in requests):
        more["sampling_logprobs_mode"] = ["support" if ENTROPY in r.columns else "selected" for r in requests]
    if any(tops := [max(map(top_of, request.columns), default=0) for request in requests]):
        more["top_logprobs_num"] = tops
    if (start := first_position(requests)) is not None:
        more |= {"return_routed_experts": True, "routed_experts_start_len": start}
    return more


def _images(requests: Sequence[SampleRequest], settings: ServerSettings, cache_keys: Sequence[str]) -> dict[str, Any]:
    """Images of the requests, and names under which the server keeps what it makes of them: of one cache key each."""
    if not any(request.images for request in requests):
        return {}
    names = [
        [sha256(f"{key} {image.sha256}".encode()).hexdigest()[:16] for image in request.images]
        for request, key in zip(requests, cache_keys, strict=True)
    ]
    data = [[_image_data(image, settings) for image in request.images] for request in requests]
    return {"image_data": data, "mm_hashes": names}


def _placeholders(request: SampleRequest) -> set[int]:
    return {int(request.input_ids[image.start]) for image in request.images}


def _input_ids(request: SampleRequest) -> list[int]:
    """Token ids as the server takes them: one placeholder for each image, which it expands itself."""
    ids = request.input_ids
    if request.images:
        keep = np.ones(len(ids), bool)
        for image in request.images:
            keep[image.start + 1 : image.start + image.tokens] = False
        ids = ids[keep]
    sent: list[int] = ids.tolist()
    return sent


@lru_cache(maxsize=8)
def _image_data(image: PromptImage, settings: ServerSettings) -> str:
    """An image as the server takes it: the name of its file where it sees that, else the bytes. Raises InvalidField."""
    if settings.sees_files:
        return f"file://{quote(str(image.path.absolute()))}"
    try:
        data = image.path.read_bytes()
    except OSError as error:
        raise InvalidField("images", image.location or image.sha256, f"one that lies here still: {error}") from error
    return f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"


def _effective_top_k(request: SampleRequest, vocab_size: int) -> int:
    return request.top_k if request.top_k < vocab_size else 0


def is_narrowed(request: SampleRequest, vocab_size: int) -> bool:
    """True if some tokens cannot be drawn, so that plain log-probabilities are not those of the draw."""
    top_k = _effective_top_k(request, vocab_size)
    return request.top_p < 1 or top_k > 0 or request.min_p > 0 or request.temperature == 0


def _top_k_for_mask(request: SampleRequest, settings: ServerSettings) -> int:
    top_k, mask_max_tokens = _effective_top_k(request, settings.vocab_size), settings.mask_max_tokens
    if top_k == 0 and settings.vocab_size <= mask_max_tokens:
        return settings.vocab_size  # changes nothing, and is finite as the mask wants it
    if not 1 <= top_k <= mask_max_tokens:
        raise InvalidField(
            "top_k",
            request.top_k,
            f"1 to {mask_max_tokens} where top_p, top_k or min_p is on or the entropy is asked for, so that the engine "
            "can report behaviour log-probabilities (its flag --sampling-mask-max-tokens raises the limit)",
        )
    return top_k


def with_mask(request: SampleRequest, vocab_size: int) -> bool:
    """True if the server is asked for what could be drawn in the place of each token."""
    return is_narrowed(request, vocab_size) or ENTROPY in request.columns


def parse_reply(
    reply: object, requests: Sequence[SampleRequest], settings: ServerSettings, pinned: Pinned | None = None
) -> list[GeneratedSample]:
    """The samples of a /generate reply to `generate_body(requests, ...)`.

    An entry that breaks the contract becomes a sample with a `fault`, so that the others are kept. Raises Malformed
    when no entry is of use.
    """
    if not isinstance(reply, list) or len(reply) != len(requests):
        shape = f"{len(reply)} entries" if isinstance(reply, list) else type(reply).__name__
        raise Malformed(f"{shape} for a batch of {len(requests)}")
    samples: list[GeneratedSample] = []
    start = first_position(requests) or 0
    for entry, request in zip(reply, requests, strict=True):
        try:
            samples.append(_parse_sample(entry, request, settings, start, pinned))
        except ODD as error:
            samples.append(unusable(request, fault_of(error), received=_tokens_in(entry)))
    if all(sample.fault for sample in samples):
        raise Malformed(samples[0].fault)
    return samples


def _tokens_in(entry: object) -> int:
    ids = entry.get("output_ids") if isinstance(entry, dict) else None
    return len(ids) if isinstance(ids, list) else 0


def _parse_sample(
    entry: dict[str, Any], request: SampleRequest, settings: ServerSettings, start: int, pinned: Pinned | None
) -> GeneratedSample:
    meta = entry["meta_info"]
    if meta["id"] != request.rid:
        raise Malformed(f"an answer to {meta['id']} in place of {request.rid}")
    names = lists_of(request, narrowed=with_mask(request, settings.vocab_size))
    lists = {name: entries_of(meta, name) for name in names}
    experts = experts_of(meta, settings.experts)
    own = None if experts is None else experts[request.experts_from - start :]
    return make_sample(request, entry["output_ids"], lists, meta, experts=own, pinned=pinned)


def make_sample(
    request: SampleRequest,
    ids: Sequence[int],
    lists: Mapping[str, Sequence[Any]],
    meta: dict[str, Any],
    *,
    experts: Array | None = None,
    spans: tuple[VersionSpan, ...] | None = None,
    pinned: Pinned | None = None,
) -> GeneratedSample:
    """The sample of tokens, the lists that were wanted of them, and the meta_info of the end. `spans` where the
    meta_info has none; `pinned` for requests under an adapter, which is their span.

    Raises one of ODD.
    """
    if request.images and len(ids) and meta["prompt_tokens"] != len(request.input_ids):
        raise Malformed(f"the server saw {meta['prompt_tokens']} input tokens in place of {len(request.input_ids)}")
    finish = meta["finish_reason"]
    reason = _FINISH_REASONS.get(finish["type"])
    if reason is None:
        raise Malformed(f"finish reason {finish['type']!r}")
    output_ids, (logprobs, entropies) = np.asarray(ids, dtype=np.int32), drawn_of(request, ids, lists)
    received = max(len(output_ids), len(logprobs))
    if reason == "abort":
        # Tokens are never handed on without the log-probability that training needs, nor without their columns.
        kept = min(len(output_ids), len(logprobs), *map(len, lists.values()))
        output_ids, logprobs = output_ids[:kept], logprobs[:kept]
    elif (said := meta.get("completion_tokens", len(output_ids))) != len(output_ids):
        raise Malformed(f"{len(output_ids)} tokens, and {said} by its own count")
    if len(logprobs) != len(output_ids):
        raise Malformed(f"{len(logprobs)} log-probabilities for {len(output_ids)} tokens")
    if not np.isfinite(logprobs).all():
        raise Malformed("a log-probability that is not finite")
    if pinned is not None:
        spans = pinned.spans(meta, len(output_ids))
    return GeneratedSample(
        rid=request.rid,
        sample_index=request.sample_index,
        output_ids=output_ids,
        logprobs=logprobs,
        spans=_spans(meta, len(output_ids)) if spans is None else spans,
        finish_reason=reason,
        columns=columns_of(request, output_ids, lists, entropies, experts, finished=reason != "abort"),
        cached_tokens=cached if isinstance(cached := meta.get("cached_tokens"), int) else 0,
        aborted_in_queue=reason == "abort" and finish.get("message") == ABORTED_IN_QUEUE,
        unusable_tokens=received - len(output_ids),
    )


def _spans(meta: dict[str, Any], length: int) -> tuple[VersionSpan, ...]:
    """Spans over [0, length), cut where fewer tokens came back than were generated."""
    spans = []
    at = 0
    for span in meta.get("weight_versions") or ():
        if at == length:
            break
        if span["start"] != at or span["end"] < at:
            raise Malformed(f"version spans that leave a gap at token {at}: {meta['weight_versions']}")
        end = min(span["end"], length)
        if end > at:
            spans.append(VersionSpan(str(span["version"]), at, end))
        at = end
    if at != length:
        raise Malformed(f"version spans for {at} of {length} tokens")
    return tuple(spans)
