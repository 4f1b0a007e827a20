"""Settings that a vLLM server reports when it is connected, and proofs of those that it does not report.

The vocabulary is in the refusal of a bias for an impossible token. How log-probabilities are made shows in one token of
which no other could have been drawn: its own is 0 under processed_logprobs, and below 0 otherwise.
"""

import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from rollout_workers.engine.calls import HttpCalls
from rollout_workers.engine.errors import EngineError, EngineMalformed, EngineRejected, EngineUnfit
from rollout_workers.engine.types import EngineInfo, EngineLoad

_IMPOSSIBLE_TOKEN_ID = 2**31 - 1
_VOCABULARY = re.compile(r"Vocabulary size: (\d+)")
_GAUGE = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)(?:\{.*\})? (\S+)$", re.MULTILINE
)
_MAX_NUM_SEQS = 256
"""vLLM's usual --max-num-seqs, for a server that does not report its own."""


@dataclass(frozen=True, slots=True)
class Found:
    """A server as it was connected."""

    info: EngineInfo
    model: str
    """Name under which the model is served."""
    start: tuple[str, ...]
    """Facts that stay as they are until the server is started anew."""


async def ask(calls: HttpCalls) -> Found:
    """Ask the server that is not paused. Raises EngineError."""
    model, start = await _model(calls), await ask_start(calls)
    vocab_size = await _ask_vocab_size(calls, model["id"])
    await _check_logprobs(calls, model["id"])
    try:
        context_length = int(model["max_model_len"])
        info = EngineInfo(
            name="vllm",
            version=start[0],
            address=calls.address,
            model_path=str(model["root"]),
            vocab_size=vocab_size,
            max_input_tokens=context_length - 1,
            context_length=context_length,
            max_running_requests=await _max_running_requests(calls),
            heeds_seeds=False,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise EngineMalformed(calls.address, "asking for its model", f"{type(error).__name__} {error}") from error
    return Found(info, str(model["id"]), start)


async def ask_start(calls: HttpCalls) -> tuple[str, ...]:
    """Facts by which a server that was started in another way is told from this one."""
    version = await calls.get("/version", "asking for its version")
    model = await _model(calls)
    return (str(version.get("version", "")), *(str(model.get(name)) for name in ("id", "root", "max_model_len")))


async def ask_label(calls: HttpCalls) -> str:
    """Label of the weights. Raises EngineUnfit for a server that does not keep one."""
    doing = "asking for the loaded version"
    reply = await calls.http.call(
        "GET", "/weight_info", doing=doing, deadline_s=calls.options.control_timeout_s, repeatable=True
    )
    if reply.status == HTTPStatus.NOT_FOUND:
        why = "it has no /weight_info: start it with VLLM_SERVER_DEV_MODE=1, or take a newer vLLM"
        raise EngineUnfit(calls.address, why)
    if reply.status != HTTPStatus.OK:
        raise EngineRejected(calls.address, doing, reply.status, reply.message)
    if not isinstance(reply.body, dict) or "weight_version" not in reply.body:
        raise EngineMalformed(calls.address, doing, f"no weight_version in {reply.message}")
    return str(reply.body["weight_version"])


async def ask_load(calls: HttpCalls) -> EngineLoad:
    """Load of the server by its metrics, summed over its data-parallel ranks."""
    doing = "asking for its load"
    reply = await calls.http.call(
        "GET", "/metrics", doing=doing, deadline_s=calls.options.control_timeout_s, repeatable=True
    )
    gauges: dict[str, list[float]] = {}
    for name, value in _GAUGE.findall(str(reply.body)):
        gauges.setdefault(name, []).append(float(value))
    if reply.status != HTTPStatus.OK or not {"num_requests_running", "num_requests_waiting"} <= gauges.keys():
        raise EngineMalformed(calls.address, doing, f"status {reply.status}, with {sorted(gauges)}")
    return EngineLoad(
        running=int(sum(gauges["num_requests_running"])),
        waiting=int(sum(gauges["num_requests_waiting"])),
        token_usage=max(gauges.get("kv_cache_usage_perc", [0.0])),
    )


async def _model(calls: HttpCalls) -> dict[str, Any]:
    doing = "asking for its model"
    models = await calls.get("/v1/models", doing)
    try:
        model: dict[str, Any] = dict(models["data"][0])
        model["id"], model["root"] = str(model["id"]), str(model.get("root") or model["id"])
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise EngineMalformed(calls.address, doing, f"{type(error).__name__} {error}") from error
    return model


async def _max_running_requests(calls: HttpCalls) -> int:
    """Requests that the server decodes at once, on all of its data-parallel ranks; the usual number where it does not
    say.
    """
    try:
        found = await calls.get("/server_info?config_format=json", "asking for its configuration")
        config = found["vllm_config"]
        limit = config["scheduler_config"]["max_num_seqs"] * config["parallel_config"]["data_parallel_size"]
    except (EngineError, KeyError, TypeError):
        return _MAX_NUM_SEQS  # An older one tells its configuration as a text, and some take too long to collect it.
    return limit if isinstance(limit, int) and limit > 0 else _MAX_NUM_SEQS


async def _ask_vocab_size(calls: HttpCalls, model: str) -> int:
    doing = "asking for its vocabulary"
    body = {"model": model, "prompt": [0], "max_tokens": 1, "logit_bias": {str(_IMPOSSIBLE_TOKEN_ID): 1.0}}
    reply = await calls.post("/v1/completions", body, doing)
    found = _VOCABULARY.search(reply.message)
    if reply.status != HTTPStatus.BAD_REQUEST or found is None:
        raise EngineMalformed(calls.address, doing, f"status {reply.status}: {reply.message}")
    return int(found[1])


async def _check_logprobs(calls: HttpCalls, model: str) -> None:
    doing = "generating one token"
    body = {"model": model, "prompt": [0], "max_tokens": 1, "temperature": 1.0, "top_k": 1, "ignore_eos": True}
    reply = await calls.post("/v1/completions", {**body, "logprobs": 0, "return_token_ids": True}, doing)
    if reply.status != HTTPStatus.OK:
        raise EngineRejected(calls.address, doing, reply.status, reply.message)
    try:
        (choice,) = reply.body["choices"]
        (logprob,), ids = choice["logprobs"]["token_logprobs"], choice.get("token_ids")
    except (KeyError, TypeError, ValueError) as error:
        raise EngineMalformed(calls.address, doing, f"{type(error).__name__} {error}") from error
    if not ids:
        raise EngineUnfit(calls.address, "it returns no token ids (return_token_ids): a newer vLLM does")
    if logprob != 0:
        why = f"a token that alone could be drawn has log-probability {logprob:g}"
        raise EngineUnfit(calls.address, f"{why}: start it with --logprobs-mode processed_logprobs")
