from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollout_workers.engine.errors import EngineUnavailable
from rollout_workers.engines import RemoteHost
from tests.engine.fake_sglang import FakeSglang, ok, refused
from tests.workers.building import options


async def test_server_that_a_killed_worker_left_paused_is_resumed(tmp_path: Path) -> None:
    async with FakeSglang() as server:

        async def ready(body: Any) -> web.StreamResponse:
            resumed = "/continue_generation" in server.order
            return ok() if resumed else refused("paused", 503)

        server.handlers["/ready"] = ready
        host = RemoteHost(server.url, options("x:1", tmp_path, simulated=None, engine_urls=(server.url,)))
        engine = await host.open()
        assert await engine.ready()
        await host.close()


async def test_update_that_a_killed_worker_left_open_is_closed(tmp_path: Path) -> None:
    async with FakeSglang() as server:
        server.session_open = True
        host = RemoteHost(server.url, options("x:1", tmp_path, simulated=None, engine_urls=(server.url,)))
        await (await host.open()).info()
        assert not server.session_open
        await host.close()


async def test_server_that_does_not_become_ready_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    async with FakeSglang() as server:

        async def never(body: Any) -> web.StreamResponse:
            return refused("still loading", 503)

        server.handlers["/ready"] = never
        made = options("x:1", tmp_path, simulated=None, engine_urls=(server.url,), engine_timeout_s=0.3)
        host = RemoteHost(server.url, made)
        with pytest.raises(EngineUnavailable, match=r"not ready after 0\.3 s"):
            await host.open()
        await host.close()
