"""Settings that an SGLang server reports when it is connected, and the check that the same process still runs.

/server_info does not tell the vocabulary, but the refusal of an impossible token id does. Nor does it name the process;
but it tells the random seed, which a server draws where none was set, and how long its start took, to the microsecond.
"""

import re
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

from rollout_workers.engine.calls import HttpCalls
from rollout_workers.engine.errors import EngineMalformed, EngineRejected
from rollout_workers.engine.sglang import versions
from rollout_workers.engine.sglang.generation import wire
from rollout_workers.engine.sglang.generation.columns import expert_shape
from rollout_workers.engine.sglang.generation.wire import ServerSettings
from rollout_workers.engine.types import EngineInfo

_IMPOSSIBLE_TOKEN_ID = 2**31 - 1
_VALID_RANGE = re.compile(r"valid range is \[0, (\d+)\)")
_DOING = "asking for its settings"
_WITH_MASKS = frozenset({"DFLASH", "DSPARK"})
"""Ways of speculative decoding whose tokens are exact draws from a known part of the vocabulary."""
_OF_ONE_START = (
    "random_seed",
    "startup_time",
    "version",
    "tp_size",
    "max_req_input_len",
    "max_running_requests",
    "sampling_mask_max_tokens",
    "incremental_streaming_output",
    "speculative_algorithm",
    "enable_return_routed_experts",
    "enable_deterministic_inference",
)
"""Fields that stay as they are until the server is started anew."""


@dataclass(frozen=True, slots=True)
class Found:
    """A server as it was connected."""

    info: EngineInfo
    settings: ServerSettings
    label: str
    """Label of the weights that the server holds."""
    model_path: Path
    ranks: int
    adapters: int
    """Most LoRA adapters that it holds at once; 0: it takes none."""
    start: dict[str, Any]
    """Fields that tell this start of the server from the next, as far as the server has them."""


async def ask(calls: HttpCalls, *, vocab_size: int | None) -> Found:
    """Ask the server that is not paused; `vocab_size` in place of what it says. Raises EngineError."""
    server = await calls.get("/server_info", _DOING)
    release, notices = versions.check(server.get("version"), calls.address, counts_as=calls.options.counts_as)
    speculative = _speculative_of(server)
    masks = _masks_under(speculative, release)
    if masks != "all":
        what = "top_p, top_k and min_p" if masks == "none" else "min_p"
        notices.append(f"no {what} with --speculative-algorithm {speculative}: {wire.SPECULATIVE_ADVICE}")
    model = await calls.get("/model_info", "asking for its model")
    models = await calls.get("/v1/models", "asking for its context length")
    vocab_size = vocab_size or await _ask_vocab_size(calls)
    try:
        info = EngineInfo(
            name="sglang",
            version=str(server.get("version", "")),
            address=calls.address,
            model_path=str(model["model_path"]),
            vocab_size=vocab_size,
            max_input_tokens=int(server["max_req_input_len"]),
            context_length=int(models["data"][0]["max_model_len"]),
            max_running_requests=int(server["max_running_requests"] or 0),
            heeds_seeds=bool(server.get("enable_deterministic_inference")),
            takes_buckets=True,
            notices=tuple(notices),
        )
        places = [Path(info.model_path), *([calls.options.config_path] if calls.options.config_path else [])]
        shape = expert_shape(places) if server.get("enable_return_routed_experts") else None
        settings = ServerSettings(
            vocab_size=vocab_size,
            mask_max_tokens=int(server.get("sampling_mask_max_tokens") or wire.MASK_TOKENS_DEFAULT),
            incremental=bool(server.get("incremental_streaming_output")),
            speculative=speculative,
            masks=masks,
            images=bool(model.get("has_image_understanding")),
            sees_files=calls.options.sees_files,
            **({"no_experts": shape} if isinstance(shape, str) else {"experts": shape} if shape is not None else {}),
        )
        return Found(
            info,
            settings,
            label=str(model["weight_version"]),
            model_path=Path(info.model_path),
            ranks=int(server.get("tp_size") or 1),
            adapters=_most_adapters(server),
            start=_start_of(server),
        )
    except wire.ODD as error:
        raise EngineMalformed(calls.address, _DOING, f"{type(error).__name__} {error}") from error


def _most_adapters(server: dict[str, Any]) -> int:
    if not server.get("enable_lora"):
        return 0
    limits = [server.get(name) for name in ("max_loras_per_batch", "max_loaded_loras")]
    return min((int(limit) for limit in limits if limit), default=0)


async def check_version(calls: HttpCalls) -> None:
    """Ask the server for its version, once. Raises EngineUnfit, and other EngineErrors where it does not answer."""
    reply = await calls.http.call(
        "GET", "/server_info", doing=_DOING, deadline_s=calls.options.ready_timeout_s, repeatable=False
    )
    if reply.status == HTTPStatus.OK and isinstance(reply.body, dict):
        versions.check(reply.body.get("version"), calls.address, counts_as=calls.options.counts_as)
    else:
        raise EngineRejected(calls.address, _DOING, reply.status, reply.message)


def _speculative_of(server: dict[str, Any]) -> str:
    said = str(server.get("speculative_algorithm") or "")
    return "" if said.upper() == "NONE" else said


def _masks_under(speculative: str, release: versions.Release) -> Literal["all", "no min_p", "none"]:
    if not speculative:
        return "all"
    known = versions.MASKS_UNDER_DFLASH not in versions.lacks(release)
    return "no min_p" if known and speculative.upper() in _WITH_MASKS else "none"


async def was_restarted(calls: HttpCalls, start: dict[str, Any]) -> bool:
    """True if a field of `start` is another by now. Raises EngineError."""
    now = _start_of(await calls.get("/server_info", "asking if it was started anew"))
    return any(now.get(name, value) != value for name, value in start.items())


def _start_of(server: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name in _OF_ONE_START if (value := server.get(name)) is not None}


async def _ask_vocab_size(calls: HttpCalls) -> int:
    doing = "asking for its vocabulary"
    body = {
        "input_ids": [0],
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "token_ids_logprob": [_IMPOSSIBLE_TOKEN_ID],
    }
    reply = await calls.post("/generate", body, doing)
    found = _VALID_RANGE.search(reply.message)
    if reply.status != 400 or found is None:
        raise EngineMalformed(calls.address, doing, f"status {reply.status}: {reply.message}")
    return int(found[1])
