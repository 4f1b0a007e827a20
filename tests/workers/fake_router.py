"""FakeRouter: the worker list of an sglang-router 0.3.2, as a test writes it."""

from typing import Any, Self

from aiohttp import web


class FakeRouter:
    """`async with` serves it on a free loopback port. `urls`: what it lists."""

    def __init__(self, *urls: str) -> None:
        self.urls = list(urls)
        self.broken = False
        self.asked = 0
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/workers", self._workers)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _workers(self, request: web.Request) -> web.Response:
        self.asked += 1
        if self.broken:
            return web.json_response({"error": "starting"}, status=500)
        return web.json_response({"workers": [self._entry(url) for url in self.urls], "total": len(self.urls)})

    @staticmethod
    def _entry(url: str) -> dict[str, Any]:
        kind = "prefill" if url.endswith("#prefill") else "regular"
        return {"id": url, "url": url.removesuffix("#prefill"), "worker_type": kind, "is_healthy": True, "load": 0}
