"""`python -m bench.columns.stub DIRECTORY`: a server that answers as SGLang does, with routed experts made beforehand.

It writes its URL to DIRECTORY/url, and a config.json beside it. Every answer has the same tokens and the same experts,
in one event a sample, as SGLang 0.5.23 writes its last one: base64 of int32.
"""

import base64
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from bench.columns import sizes

_PIECE = 1 << 20


def experts(positions: int) -> bytes:
    """Base64 of int32 [positions, layers, k], as it lies on SGLang's wire."""
    shape = (positions, sizes.LAYERS, sizes.TOP_K)
    return base64.b64encode(np.random.default_rng(0).integers(0, sizes.EXPERTS, shape, np.int32).tobytes())


class Stub:
    """Handlers of a server with the experts of `positions` inputs."""

    def __init__(self, directory: Path, positions: int) -> None:
        self._directory = directory
        self._positions = positions
        self._experts = experts(positions)

    def told(self) -> dict[str, dict[str, Any]]:
        """Answers to questions about the server, by path."""
        info = {"max_req_input_len": 100_000, "max_running_requests": 64, "tp_size": 1, "random_seed": 1}
        flags = {"incremental_streaming_output": True, "enable_return_routed_experts": True}
        return {
            "/server_info": {"version": "0.5.23", **info, **flags},
            "/model_info": {"model_path": str(self._directory), "weight_version": "default"},
            "/v1/models": {"data": [{"max_model_len": 200_000}]},
            "/v1/loads": {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0, "token_usage": 0.0}]},
        }

    async def other(self, request: web.Request) -> web.Response:
        """Answer whatever is no generation."""
        return web.json_response(self.told().get(request.path, {}))

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer a batch with an event a sample."""
        asked = await request.json()
        if "token_ids_logprob" in asked:
            message = "out-of-vocabulary token id 1; valid range is [0, 1000)."
            return web.json_response({"error": {"message": message}}, status=400)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for index, (rid, ids, sampling) in enumerate(
            zip(asked["rid"], asked["input_ids"], asked["sampling_params"], strict=True)
        ):
            if asked.get("return_routed_experts") and len(ids) + sampling["max_new_tokens"] - 1 != self._positions:
                raise web.HTTPBadRequest(text=f"there are experts of {self._positions} inputs alone")
            await self._event(answer, index, rid, sampling["max_new_tokens"], asked)
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def _event(
        self, answer: web.StreamResponse, index: int, rid: str, tokens: int, asked: dict[str, Any]
    ) -> None:
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": {"type": "length", "length": tokens},
            "weight_versions": [{"version": "default", "start": 0, "end": tokens}],
            "output_token_logprobs": [[-0.5, 7, None]] * tokens,
            "completion_tokens": tokens,
        }
        wanted = bool(asked.get("return_routed_experts"))
        if wanted:
            meta["routed_experts"] = "@"
        event = {"output_ids": [7] * tokens, "meta_info": meta, "index": index}
        head, _, tail = json.dumps(event, separators=(",", ":")).encode().partition(b"@")
        await answer.write(b"data: " + head)
        if wanted:
            text = memoryview(self._experts)
            for at in range(0, len(text), _PIECE):
                await answer.write(text[at : at + _PIECE])
        await answer.write(tail + b"\n\n")


def main(directory: Path, positions: int) -> None:
    """Serve until it is killed."""
    shape = {"num_hidden_layers": sizes.LAYERS, "num_experts_per_tok": sizes.TOP_K, "num_experts": sizes.EXPERTS}
    (directory / "config.json").write_text(json.dumps(shape))
    stub = Stub(directory, positions)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/generate", stub.generate)
    app.router.add_route("*", "/{path:.*}", stub.other)

    async def started(_: web.Application) -> None:
        (directory / "url").write_text(f"http://127.0.0.1:{port}")

    port = sizes.free_port()
    app.on_startup.append(started)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
