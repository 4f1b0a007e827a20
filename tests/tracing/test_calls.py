"""Calls to engines carry the context of who makes them, and none where nothing is traced."""

from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.traces.receiver import Receiver
from buffer_wire.tracing import process
from buffer_wire.tracing.contexts import RunTraces
from rollout_workers.engine.http import HttpConnection


async def test_an_engine_is_told_the_context_of_the_call(received: Receiver) -> None:
    seen: list[tuple[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.headers.get("traceparent", ""), request.headers["Content-Type"]))
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/generate", answer)
    tracer = process.start("a worker")
    assert tracer is not None
    context = RunTraces("r", 1).group("t/0").child("generate")
    async with TestServer(app) as server:
        engine = HttpConnection(str(server.make_url("")))

        async def generate(body: object) -> None:
            await engine.call("POST", "/generate", body, doing="generating", deadline_s=10, repeatable=False)

        await generate(b"{}")
        with tracer.within(context):
            await generate(b"{}")
            await generate({"text": "by value"})
        await engine.close()
    is_json = "application/json"
    assert seen == [("", is_json), (context.traceparent, is_json), (context.traceparent, is_json)]
