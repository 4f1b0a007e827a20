"""Engines that a router lists: found, added, let go; and what a router that is away or empty for a moment changes."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from rollout_buffer.v1 import weights_pb2
from rollout_workers.engine.errors import EngineMalformed, EngineUnavailable, EngineUnfit
from rollout_workers.engine.sglang.hosts import host_at
from rollout_workers.engines import open_slot
from rollout_workers.fleet import router as router_module
from rollout_workers.fleet.router import RouterClient, RouterWatch, first_ready
from rollout_workers.worker import Worker
from tests.engine.fake_sglang import FakeSglang
from tests.workers.building import eventually, length_reward, options, task, weight_files
from tests.workers.fake_router import FakeRouter
from tests.workers.fake_service import FakeService


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "EVERY_S", 0.02)


class Following:
    """A watch whose engines are names."""

    def __init__(self, router: FakeRouter) -> None:
        self.client = RouterClient(router.url)
        self.at_work: set[str] = set()
        self.log: list[str] = []
        self.not_ready: set[str] = set()
        self.watch = RouterWatch(self.client, lambda: self.at_work, add=self._add, remove=self._remove)

    async def _add(self, url: str) -> None:
        self.log.append(f"+{url}")
        if url in self.not_ready:
            raise EngineUnavailable(url, "starting", "not ready")
        self.at_work.add(url)

    async def _remove(self, url: str) -> None:
        self.log.append(f"-{url}")
        self.at_work.discard(url)


@asynccontextmanager
async def following(router: FakeRouter) -> AsyncIterator[Following]:
    made = Following(router)
    running = asyncio.create_task(made.watch.run())
    try:
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await made.client.close()


async def listings(router: FakeRouter, count: int) -> None:
    """Let so many more listings be answered and acted upon."""
    upto = router.asked + count + 1
    await eventually(lambda: router.asked >= upto)


async def test_servers_are_added_and_let_go_as_they_are_listed() -> None:
    async with FakeRouter("http://a:1", "http://b:1") as router, following(router) as it:
        await eventually(lambda: it.at_work == {"http://a:1", "http://b:1"})
        router.urls = ["http://b:1", "http://c:1"]
        await eventually(lambda: it.at_work == {"http://b:1", "http://c:1"})
        assert it.log == ["+http://a:1", "+http://b:1", "+http://c:1", "-http://a:1"]


async def test_a_router_that_knows_nothing_for_a_moment_changes_nothing() -> None:
    async with FakeRouter("http://a:1") as router, following(router) as it:
        await eventually(lambda: bool(it.at_work))
        for _ in range(5):
            router.urls = []
            await eventually(lambda: it.watch._missing.get("http://a:1") == 1)
            router.urls = ["http://a:1"]
            await eventually(lambda: not it.watch._missing)
        router.broken = True
        await listings(router, 2 * router_module.MISSING)
        assert it.log == ["+http://a:1"]


async def test_a_listed_server_that_is_not_ready_is_tried_again() -> None:
    async with FakeRouter("http://a:1") as router, following(router) as it:
        it.not_ready = {"http://a:1"}
        await eventually(lambda: len(it.log) >= 3)
        it.not_ready = set()
        await eventually(lambda: bool(it.at_work))


async def test_only_whole_engines_are_taken_and_each_once() -> None:
    async with FakeRouter("http://a:1@0", "http://a:1@1", "http://p:1#prefill", "grpc://g:1") as router:
        client = RouterClient(router.url)
        assert await client.servers() == ["http://a:1"]
        await client.close()


async def test_something_else_than_a_router_is_named(fake: FakeService) -> None:
    async with FakeSglang() as server:
        server.handlers["/workers"] = server.handlers["/ready"]
        client = RouterClient(server.url)
        with pytest.raises(EngineMalformed, match="asking the router for its workers"):
            await client.servers()
        await client.close()


async def test_servers_of_a_router_that_are_too_old_are_refused_by_name_and_said_once(tmp_path: Path) -> None:
    made = options("x:1", tmp_path, simulated=None, router="http://unused")
    async with FakeSglang("0.5.19") as old, FakeSglang() as good, FakeRouter(old.url) as router:
        client = RouterClient(router.url)
        with pytest.raises(EngineUnfit, match=r"SGLang 0\.5\.19"):
            await first_ready(client, made)
        router.urls = [old.url, good.url]
        host = await first_ready(client, made)
        assert host.url == good.url
        await host.close()

        tried: list[str] = []

        async def add(url: str) -> None:
            tried.append(url)
            refused = host_at(url, made)
            try:
                await open_slot("e", refused)
            finally:
                await refused.close()

        async def remove(url: str) -> None:
            raise AssertionError

        watch = RouterWatch(client, lambda: {good.url}, add=add, remove=remove, every_s=0.01)
        with capture_logs() as logs:
            running = asyncio.create_task(watch.run())
            await eventually(lambda: len(tried) > 3)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        assert [log["address"] for log in logs if log["event"] == "engine not added"] == [old.url]
        await client.close()


def engine_of(fake: FakeService, engine_id: str) -> Any:
    return next((report for report in reversed(fake.reports) if report.engine_id == engine_id), None)


async def test_a_worker_drives_what_the_router_lists_while_it_changes(fake: FakeService, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(FakeSglang()) for _ in range(3)]
        for server in servers:
            server.version = "default"
        router = await stack.enter_async_context(FakeRouter(servers[0].url))
        made = options(fake.address, tmp_path, simulated=None, router=router.url, lease_wait_s=0.1)
        worker = Worker(made, reward=length_reward)
        running = asyncio.create_task(worker.run())
        stack.callback(running.cancel)
        async with asyncio.timeout(40):
            await fake.submit(task("t0", group_size=2))
            await fake.until(lambda: "t0" in fake.results())

            router.urls = [server.url for server in servers[:2]]
            await eventually(lambda: len(worker.slots) == 2)
            router.urls = [servers[1].url]
            await eventually(lambda: [slot.info.address for slot in worker.slots] == [servers[1].url])
            await eventually(lambda: engine_of(fake, "w.e0").state == weights_pb2.ENGINE_STATE_STOPPED)
            servers[1].received.clear()
            await fake.submit(task("t1", group_size=2))
            await fake.until(lambda: "t1" in fake.results())
            assert servers[1].received["/generate"]

            # The first comes back under its old name.
            router.urls = [servers[0].url]
            await eventually(lambda: [slot.engine_id for slot in worker.slots] == ["w.e0"])
            await fake.submit(task("t2", group_size=2))
            await fake.until(lambda: "t2" in fake.results())
            worker.stop()
            await running
        assert engine_of(fake, "w.e0").state == weights_pb2.ENGINE_STATE_STOPPED
        assert not fake.returns


async def test_weights_of_an_engine_that_has_left_are_not_kept(fake: FakeService, tmp_path: Path) -> None:
    def kept() -> set[str]:
        return {path.name.partition("-")[0] for path in (tmp_path / "weights" / "r").glob("[0-9]*")}

    no_tensors = {"model.safetensors": struct.pack("<Q", 2) + b"{}"}
    manifest = weights_pb2.WeightManifest(files=weight_files(tmp_path / "published", no_tensors))
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(FakeSglang()) for _ in range(2)]
        router = await stack.enter_async_context(FakeRouter(*(server.url for server in servers)))
        made = options(fake.address, tmp_path, simulated=None, router=router.url, lease_wait_s=0.1, keep_versions=1)
        worker = Worker(made, reward=length_reward)
        running = asyncio.create_task(worker.run())
        stack.callback(running.cancel)
        async with asyncio.timeout(40):
            await fake.publish(1, 1, manifest)
            await eventually(lambda: [slot.loaded.label for slot in worker.slots] == ["1.1", "1.1"])
            router.urls = [servers[1].url]
            await eventually(lambda: [slot.info.address for slot in worker.slots] == [servers[1].url])
            await fake.publish(1, 2, manifest)
            await eventually(lambda: kept() == {"1.2"})
            await eventually(lambda: len(worker._hosts) == 1)
            worker.stop()
            await running


async def test_a_worker_whose_router_lists_nothing_ends_and_says_so(fake: FakeService, tmp_path: Path) -> None:
    async with FakeRouter() as router:
        made = options(fake.address, tmp_path, simulated=None, router=router.url, engine_timeout_s=0.2)
        with pytest.raises(EngineUnavailable, match="it lists no server"):
            await asyncio.wait_for(Worker(made, reward=length_reward).run(), 20)
