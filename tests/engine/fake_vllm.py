"""FakeVllm: an HTTP server with vLLM's paths and reply shapes. No real vLLM was at hand to record.

Its replies are put together by vLLM's documentation and source: /v1/completions with `return_token_ids` and its stream,
and the endpoints of VLLM_SERVER_DEV_MODE=1. It generates nothing: every completion has the tokens 1, 2, 3 …, of which
`made` says how many are there.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any, Self

from aiohttp import web

Handler = Callable[[web.Request, Any], Awaitable[web.StreamResponse]]
VOCABULARY = 50


def refused(message: str, status: int = 400) -> web.Response:
    """A refusal, in the form of OpenAI's."""
    error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
    return web.json_response({"error": error}, status=status)


def choice(tokens: list[int], *, logprob: float = -0.5, finish: str | None = None, **more: Any) -> dict[str, Any]:
    """One choice of an answer or of an event."""
    return {
        "index": 0,
        "text": "x" * len(tokens),
        "logprobs": {
            "text_offset": list(range(len(tokens))),
            "token_logprobs": [logprob] * len(tokens),
            "tokens": ["x"] * len(tokens),
            "top_logprobs": [{"x": logprob}] * len(tokens),
        },
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": tokens,
        **more,
    }


def event(body: dict[str, Any], *choices: dict[str, Any], usage: int | None = None) -> bytes:
    """One event of a stream."""
    counted = None if usage is None else {"prompt_tokens": 3, "total_tokens": 3 + usage, "completion_tokens": usage}
    said = {
        "id": f"cmpl-{body['request_id']}",
        "object": "text_completion",
        "created": 1_790_000_000,
        "model": body["model"],
        "choices": list(choices),
        "usage": counted,
    }
    return b"data: " + json.dumps(said).encode() + b"\n\n"


class FakeVllm:
    """`async with` serves it on a free loopback port."""

    def __init__(self) -> None:
        self.label = "default"
        self.logprobs_mode = "processed_logprobs"
        self.model_path = "/nowhere"
        self.paused = False
        self.made = 6
        """Tokens of a completion that are made at once; one that asks for more goes on until it is aborted."""
        self.aborts = True
        """False where /abort_requests does nothing."""
        self.others = 0
        """Requests of others that run in it, and as many that wait."""
        self.order: list[str] = []
        """Paths of the calls, in their order."""
        self.received: dict[str, list[Any]] = defaultdict(list)
        self.running: dict[str, asyncio.Event] = {}
        """Completions under way, by vLLM's id; each ends when its event is set."""
        self.disconnected: list[str] = []
        self.url = ""
        self.handlers: dict[str, Handler] = {
            "/health": self._empty,
            "/version": self._version,
            "/is_paused": self._is_paused,
            "/v1/models": self._models,
            "/server_info": self._server_info,
            "/v1/completions": self._completions,
            "/weight_info": self._weight_info,
            "/update_weight_version": self._update_weight_version,
            "/collective_rpc": self._collective_rpc,
            "/pause": self._pause,
            "/resume": self._resume,
            "/abort_requests": self._abort,
            "/metrics": self._metrics,
        }
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._dispatch)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _dispatch(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.order.append(request.path)
        self.received[request.path].append(body)
        handler = self.handlers.get(request.path)
        return await handler(request, body) if handler else web.json_response({"detail": "Not Found"}, status=404)

    # --- completions ------------------------------------------------------------------------------------------

    async def _completions(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body.get("logit_bias"):
            (token,) = body["logit_bias"]
            said = f"token_id(s) [{token}] in logit_bias contain out-of-vocab token ids. Vocabulary size: {VOCABULARY}"
            return refused(said)
        if "request_id" not in body:  # one token, that alone could be drawn
            logprob = 0.0 if self.logprobs_mode == "processed_logprobs" else -1.3
            return web.json_response({"choices": [choice([1], logprob=logprob, finish="length")]})
        name = f"cmpl-{body['request_id']}-0"
        self.running[name] = ended = asyncio.Event()
        made = min(self.made, body["max_tokens"])
        if made == body["max_tokens"]:
            ended.set()
        try:
            return await (self._stream if body["stream"] else self._whole)(request, body, made, ended)
        except (asyncio.CancelledError, ConnectionError):
            self.disconnected.append(name)
            raise
        finally:
            del self.running[name]

    async def _whole(
        self, request: web.Request, body: dict[str, Any], made: int, ended: asyncio.Event
    ) -> web.StreamResponse:
        await ended.wait()
        tokens = list(range(1, made + 1))
        finish = "length" if made == body["max_tokens"] else "abort"
        usage = {"prompt_tokens": 3, "total_tokens": 3 + made, "completion_tokens": made}
        return web.json_response({"choices": [choice(tokens, finish=finish)], "usage": usage})

    async def _stream(
        self, request: web.Request, body: dict[str, Any], made: int, ended: asyncio.Event
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for at in range(0, made, body["stream_interval"]):
            tokens = list(range(at + 1, min(at + body["stream_interval"], made) + 1))
            first = {"prompt_token_ids": body["prompt"]} if at == 0 else {}
            last = "length" if tokens[-1] == body["max_tokens"] else None
            await response.write(event(body, choice(tokens, finish=last, **first)))
        if made < body["max_tokens"]:
            await ended.wait()
            await response.write(event(body, choice([], finish="abort")))
        await response.write(event(body, usage=made))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _abort(self, request: web.Request, body: Any) -> web.Response:
        asked = body["request_ids"] or list(self.running)
        if self.aborts:
            for name in asked:
                if name in self.running:
                    self.running[name].set()
        return web.json_response({"status": "aborted", "aborted": len(asked)})

    # --- what is under VLLM_SERVER_DEV_MODE -------------------------------------------------------------------

    async def _pause(self, request: web.Request, body: Any) -> web.Response:
        self.paused = True
        if request.query.get("mode", "abort") == "abort":
            for ended in self.running.values():
                ended.set()
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request, body: Any) -> web.Response:
        self.paused = False
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, request: web.Request, body: Any) -> web.Response:
        return web.json_response({"is_paused": self.paused})

    async def _weight_info(self, request: web.Request, body: Any) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def _update_weight_version(self, request: web.Request, body: Any) -> web.Response:
        self.label = body["new_version"]
        return web.json_response({"success": True, "new_version": self.label})

    async def _collective_rpc(self, request: web.Request, body: Any) -> web.Response:
        return web.json_response({"results": [None]})

    # --- what it says about itself ----------------------------------------------------------------------------

    async def _empty(self, request: web.Request, body: Any) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request, body: Any) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _models(self, request: web.Request, body: Any) -> web.Response:
        model = {"id": "tiny", "object": "model", "root": self.model_path, "parent": None, "max_model_len": 128}
        return web.json_response({"object": "list", "data": [model]})

    async def _server_info(self, request: web.Request, body: Any) -> web.Response:
        if request.query.get("config_format") != "json":
            return web.json_response({"vllm_config": "model='tiny', max_num_seqs=48"})
        config = {"scheduler_config": {"max_num_seqs": 48}, "parallel_config": {"data_parallel_size": 2}}
        return web.json_response({"vllm_config": config, "vllm_env": {}, "system_env": {}})

    async def _metrics(self, request: web.Request, body: Any) -> web.Response:
        lines = [
            "# HELP vllm:num_requests_running Number of requests in model execution batches.",
            "# TYPE vllm:num_requests_running gauge",
            f'vllm:num_requests_running{{engine="0",model_name="tiny"}} {float(self.others)}',
            'vllm:num_requests_running{engine="1",model_name="tiny"} 0.0',
            f'vllm:num_requests_waiting{{engine="0",model_name="tiny"}} {float(self.others)}',
            'vllm:num_requests_waiting{engine="1",model_name="tiny"} 0.0',
            'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25',
            'vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.5',
        ]
        return web.Response(text="\n".join(lines) + "\n")
