"""A store whose disk is full: nothing is acknowledged that it could not append, what only reads goes on."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from buffer_service.store.redis_store import RedisRunStore
from buffer_wire.errors import StoreOutOfDisk, StoreUnavailable
from tests.store.driver import Run
from tests.support.store_server import StoreServer

SOON_S = 30.0


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with StoreServer("--appendonly", "yes", "--appendfsync", "no") as running:
        yield running


@pytest.fixture
async def run(server: StoreServer) -> AsyncIterator[Run]:
    store = await RedisRunStore.connect(server.url, timeout_s=10)
    run = Run(store)
    await run.create(max_queued_groups=100)
    await run.fill("a", "b", "c", "d")
    yield run
    await store.close()


async def until_there(run: Run) -> None:
    """The server looks once a second whether it can append again; connections of before a restart are found out."""
    async with asyncio.timeout(SOON_S):
        while True:
            try:
                await run.view()
                await run.submit(f"again-{time.monotonic_ns()}")
                await run.store.push(run.run_id, [])
                return
            except (StoreOutOfDisk, StoreUnavailable):
                await asyncio.sleep(0.05)


async def test_a_write_that_was_not_appended_is_not_acknowledged(server: StoreServer, run: Run) -> None:
    server.fill_disk()
    for attempt in range(3):
        with pytest.raises(StoreOutOfDisk) as refused:
            await run.push(run.group("lost", b"x" * 100))
        assert refused.value.retryable, attempt
    with pytest.raises(StoreOutOfDisk):
        await run.submit("task")
    server.kill()
    server.start()
    await until_there(run)
    assert await run.push_kinds(run.group("lost", b"again")) == ["queued"]
    view = await run.view()
    assert view.paused == "", "what was never acknowledged is no loss"
    assert await run.push_kinds(*(run.group(name) for name in "abcd")) == ["duplicate"] * 4
    await run.check()


async def test_of_pushes_at_once_those_that_are_acknowledged_survive(server: StoreServer, run: Run) -> None:
    server.fill_disk(left=20_000)
    acknowledged, refused = [], 0

    async def push(name: str) -> None:
        nonlocal refused
        try:
            assert await run.push_kinds(run.group(name, b"x" * 1000)) == ["queued"]
            acknowledged.append(name)
        except StoreOutOfDisk:
            refused += 1

    await asyncio.gather(*(push(f"t{number}") for number in range(64)))
    assert refused > 0
    server.kill()
    server.start()
    await until_there(run)
    kinds = [await run.push_kinds(run.group(name)) for name in acknowledged]
    assert kinds == [["duplicate"]] * len(acknowledged)
    assert (await run.view()).paused == ""
    await run.check()


async def test_a_refused_write_is_made_up_for_and_views_go_on(server: StoreServer, run: Run) -> None:
    server.fill_disk()
    with pytest.raises(StoreOutOfDisk):
        await run.push(run.group("e", b"body-e"))
    assert await run.store.list_runs() == [run.run_id]
    assert (await run.view()).paused == ""
    with pytest.raises(StoreOutOfDisk):
        # Made of what the server may still lose.
        await run.pull(0)
    server.free_disk()
    await until_there(run)
    assert await run.push_kinds(run.group("e", b"other")) == ["duplicate"], "it was done, and had not been said"
    assert await run.bodies(await run.batch(0)) == [b"body-a", b"body-b"]
    await run.check()
