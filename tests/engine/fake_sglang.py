"""FakeSglang: an HTTP server with SGLang's paths and reply shapes, for faults that a real one cannot be told to have.

It generates nothing. Each path answers by a handler that a test can replace; every request body is recorded.
"""

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Any, Self

from aiohttp import web

from rollout_workers.engine.sglang.versions import release_of

Handler = Callable[[Any], Awaitable[web.StreamResponse]]

VOCABULARY = 50

_SINCE = {"/ready": (0, 5, 20), "/begin_weight_update": (0, 5, 21), "/end_weight_update": (0, 5, 21)}
"""Paths that releases before do not know, as their wheels have it."""


def ok(body: object = None) -> web.Response:
    return web.json_response(body if body is not None else {})


def refused(message: str, status: int = 400) -> web.Response:
    return web.json_response({"success": False, "message": message}, status=status)


def answer(rid: str, tokens: list[int], **meta: Any) -> dict[str, Any]:
    """One entry of a /generate reply, with every field in order; `meta` replaces some."""
    return {
        "output_ids": tokens,
        "meta_info": {
            "id": rid,
            "finish_reason": {"type": "length", "length": len(tokens)},
            "weight_version": "end",
            "weight_versions": [{"version": "1.0", "start": 0, "end": len(tokens)}],
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            **meta,
        },
    }


def event(entry: object) -> bytes:
    """One event of a stream, as SGLang writes it."""
    return b"data: " + json.dumps(entry, separators=(",", ":")).encode() + b"\n\n"


def as_stream(response: web.StreamResponse) -> web.StreamResponse:
    """The stream that says the same as a plain reply to a batch: one event for each entry."""
    if not isinstance(response, web.Response) or response.content_type != "application/json":
        return response
    if response.status != 200 or not isinstance(response.body, bytes):
        return response
    entries = json.loads(response.body)
    events = b"".join(event({**entry, "index": i}) for i, entry in enumerate(entries))
    return web.Response(body=events + b"data: [DONE]\n\n", content_type="text/event-stream")


class FakeSglang:
    """`async with` serves it on a free loopback port."""

    def __init__(self, sglang: str | None = "0.5.23") -> None:
        self.sglang = sglang
        """Its release: it has the habits of that one, and says so. None: those of the newest, and it does not say."""
        self.speculative: str | None = None
        self.deterministic = False
        self.routed_experts = False
        self.version = "1.0"
        self.model_path = "/nowhere"
        self.mask_max_tokens = 4096
        self.ranks = 1
        self.session_open = False
        self.most_adapters = 0
        """Adapters that it holds at once; 0: it was started without --enable-lora."""
        self.adapters: dict[str, str] = {}
        """Paths of the adapters that it holds, by name."""
        self.running = Counter[str]()
        """Requests that run under each adapter."""
        self.groups: set[str] = set()
        self.order: list[str] = []
        """Paths of the calls, in their order."""
        self.incremental = False
        self.starts = 1
        self.received: dict[str, list[Any]] = defaultdict(list)
        self.handlers: dict[str, Handler] = {
            "/ready": self._done,
            "/server_info": self._server_info,
            "/model_info": self._model_info,
            "/v1/models": self._models,
            "/v1/loads": self._loads,
            "/generate": self._generate,
            "/abort_request": self._done,
            "/pause_generation": self._done,
            "/continue_generation": self._done,
            "/update_weights_from_disk": self._update,
            "/update_weight_version": self._relabel,
            "/load_lora_adapter": self._load_adapter,
            "/unload_lora_adapter": self._unload_adapter,
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
            "/update_weights_from_tensor": self._update_part,
            "/update_weights_from_distributed": self._update_part,
            "/init_weights_update_group": self._join,
            "/destroy_weights_update_group": self._leave,
        }
        release = release_of(sglang) or (9, 9, 9)
        for path, since in _SINCE.items():
            if release < since:
                del self.handlers[path]
        self._release = release
        self.waiting = 0
        """Requests that wait in it, held back by a pause."""
        self.ended = False
        """True once its scheduler has ended, and the server with it."""
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._dispatch)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def start_anew(self, *, version: str = "default") -> None:
        """Start anew: another start may say differently what it said about itself before; the weights are those of the
        start.
        """
        self.starts += 1
        self.version = version
        self.adapters.clear()

    def in_turn(self, path: str, *handlers: Handler) -> None:
        """Answer `path` by one handler after the other; the last one stays."""
        remaining = list(handlers)

        async def next_one(body: Any) -> web.StreamResponse:
            return await (remaining.pop(0) if len(remaining) > 1 else remaining[0])(body)

        self.handlers[path] = next_one

    async def _dispatch(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.received[request.path].append(body)
        self.order.append(request.path)
        names: list[str] = (body.get("lora_path") or []) if body and request.path == "/generate" else []
        if unknown := [name for name in names if name not in self.adapters]:
            return _never_loaded(unknown[0], streamed=bool(body and body["stream"]))
        self.running.update(names)
        try:
            response = await self.handlers.get(request.path, _not_found)(body) if not self.ended else HANG_UP
        finally:
            self.running.subtract(names)
        if request.path == "/generate" and body and body.get("stream"):
            response = as_stream(response)
        if response is HANG_UP:
            assert request.transport is not None
            request.transport.close()
        return response

    async def _done(self, body: Any) -> web.StreamResponse:
        return ok()

    async def _server_info(self, body: Any) -> web.StreamResponse:
        limits = {"max_req_input_len": 90, "max_running_requests": 4, "sampling_mask_max_tokens": self.mask_max_tokens}
        return ok(
            {
                **({} if self.sglang is None else {"version": self.sglang}),
                "speculative_algorithm": self.speculative,
                "enable_deterministic_inference": self.deterministic,
                "enable_return_routed_experts": self.routed_experts,
                "tp_size": self.ranks,
                "incremental_streaming_output": self.incremental,
                "enable_lora": self.most_adapters > 0,
                "max_loras_per_batch": self.most_adapters or 8,
                "max_loaded_loras": None,
                "startup_time": {"scheduler_e2e": 10.0 + self.starts / 1_000},
                **limits,
            }
        )

    async def _model_info(self, body: Any) -> web.StreamResponse:
        return ok({"model_path": self.model_path, "weight_version": self.version})

    async def _models(self, body: Any) -> web.StreamResponse:
        cards = [
            {"id": name, "root": path, "parent": "model", "max_model_len": None} for name, path in self.adapters.items()
        ]
        return ok({"data": [{"id": "model", "max_model_len": 100, "parent": None}, *cards]})

    async def _loads(self, body: Any) -> web.StreamResponse:
        return ok({"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0, "token_usage": 0.0}]})

    async def _generate(self, body: Any) -> web.StreamResponse:
        if body.get("token_ids_logprob"):
            return await asks_vocabulary(body)
        entries = [answer(rid, [7, 8]) for rid in body["rid"]]
        if self._release < (0, 5, 19):
            for entry in entries:
                del entry["meta_info"]["weight_versions"]
        return ok(entries)

    async def _update(self, body: Any) -> web.StreamResponse:
        if body["flush_cache"] and self.waiting and self._release < (0, 5, 21):
            # assert flush_cache_success
            self.ended = True
            return HANG_UP
        self.version = body["weight_version"]
        return ok({"success": True, "message": "Succeeded to update model weights."})

    async def _load_adapter(self, body: Any) -> web.StreamResponse:
        name = body["lora_name"]
        if not self.most_adapters:
            return self._adapters_are("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
        if name in self.adapters:
            return self._adapters_are(f"Failed to load LoRA adapter {name} because it is already loaded")
        self.adapters[name] = body["lora_path"]
        return self._adapters_are()

    async def _unload_adapter(self, body: Any) -> web.StreamResponse:
        name = body["lora_name"]
        if name not in self.adapters:
            return self._adapters_are(f"LoRA with name {name} does not exist. Loaded LoRAs: {list(self.adapters)}")
        if self.running[name]:
            await asyncio.Event().wait()  # It waits for them, and holds every other load up.
        del self.adapters[name]
        return self._adapters_are()

    def _adapters_are(self, error: str | None = None) -> web.StreamResponse:
        body = {"success": error is None, "error_message": error, "loaded_adapters": self.adapters}
        return web.json_response(body, status=400 if error else 200)

    async def _begin(self, body: Any) -> web.StreamResponse:
        if self.session_open:
            return refused("a weight-update session is already open; call end_weight_update() first")
        self.session_open = True
        return ok({"success": True, "message": "Success"})

    async def _end(self, body: Any) -> web.StreamResponse:
        if not self.session_open:
            return refused("no weight-update session is open; call begin_weight_update() first")
        self.session_open = False
        return ok({"success": True, "message": "Success"})

    async def _update_part(self, body: Any) -> web.StreamResponse:
        if not self.session_open:
            return refused("must run between begin_weight_update() and end_weight_update()")
        self.version = body["weight_version"] or self.version
        return ok({"success": True, "message": "Succeeded to update parameter online."})

    async def _join(self, body: Any) -> web.StreamResponse:
        self.groups.add(body["group_name"])
        return ok({"success": True, "message": "Succeeded to initialize custom process group."})

    async def _leave(self, body: Any) -> web.StreamResponse:
        if body["group_name"] not in self.groups:
            return refused("The group to be destroyed does not exist.")
        self.groups.remove(body["group_name"])
        return ok({"success": True, "message": "Succeeded to destroy custom process group."})

    async def _relabel(self, body: Any) -> web.StreamResponse:
        self.version = body["new_version"]
        return ok()


def _never_loaded(name: str, *, streamed: bool) -> web.StreamResponse:
    error = {"message": f"Got LoRA adapter that has never been loaded: {name}\nAll loaded adapters: dict_keys([])."}
    if not streamed:
        return web.json_response({"error": error}, status=400)
    return web.Response(body=event({"error": {**error, "code": 400}}) + b"data: [DONE]\n\n")


async def _not_found(body: Any) -> web.StreamResponse:
    return web.json_response({"detail": "Not Found"}, status=404)


HANG_UP = web.Response()
"""A handler that returns this drops the connection instead."""


async def hang_up(body: Any) -> web.StreamResponse:
    return HANG_UP


async def never_answer(body: Any) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def asks_vocabulary(body: Any) -> web.StreamResponse:
    message = f"token_ids_logprob contains out-of-vocabulary token id 1; valid range is [0, {VOCABULARY})."
    return web.json_response({"error": {"message": message}}, status=400)
