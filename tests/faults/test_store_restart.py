"""A store that restarts: it loads its data while calls come in, and has forgotten the scripts."""

import asyncio

import pytest

from buffer_service.store.redis_store import RedisRunStore
from buffer_wire.errors import StoreOutOfDisk, StoreUnavailable
from tests.store.driver import Run
from tests.support.store_server import StoreServer, store_server

pytestmark = pytest.mark.faults

GROUPS = 40
PADDING = 5_000
"""Commands in the append-only file; a store that loads looks up every thousand or so."""
LOAD_S = 1.5
"""Time that it takes to load them, with a pause after each."""


async def until_noticed(run: Run) -> None:
    """The connections of before the restart are known to be gone."""
    try:
        await run.view()
    except StoreUnavailable:
        return


def slow_server() -> StoreServer:
    pause_us = int(LOAD_S * 1e6 / PADDING)
    return StoreServer("--appendonly", "yes", "--appendfsync", "no", "--key-load-delay", str(pause_us))


async def test_calls_wait_while_the_store_loads_and_find_everything() -> None:
    with slow_server() as server:
        store = await RedisRunStore.connect(server.url, timeout_s=10)
        run = Run(store)
        await run.create(max_queued_groups=100, batch_groups=GROUPS)
        await run.fill(*(f"t{number}" for number in range(GROUPS)))
        await run.command("EVAL", f"for i = 1, {PADDING} do redis.call('SET', KEYS[1], i) end", 1, "padding")
        server.kill()
        server.launch()
        server.until_loading()
        await until_noticed(run)
        began = asyncio.get_running_loop().time()
        # A transaction, a script, a command and payloads, all at once.
        pushed, view, runs = await asyncio.gather(run.push_kinds(run.group("more")), run.view(), store.list_runs())
        assert asyncio.get_running_loop().time() - began > LOAD_S / 4
        assert (pushed, view.revision > GROUPS, list(runs)) == (["queued"], True, [run.run_id])
        bodies = await run.bodies(await run.batch(0))
        assert bodies == [f"body-t{number}".encode() for number in range(GROUPS)]
        assert (await run.view()).paused == ""
        await run.check()
        # Connections made while it loaded know that it has an append-only file.
        server.fill_disk()
        with pytest.raises(StoreOutOfDisk):
            await run.push(run.group("lost"))
        await store.close()


@pytest.mark.parametrize("again", [False, True])
async def test_a_push_into_a_store_that_has_forgotten_the_scripts_happens_once(again: bool) -> None:
    with store_server() as server:
        store = await RedisRunStore.connect(server.url, timeout_s=10)
        run = Run(store)
        await run.create()
        await run.command("SCRIPT", "FLUSH")
        assert await run.push_kinds(run.group("a", b"kept")) == ["queued"]
        if again:
            await run.command("SCRIPT", "FLUSH")
            assert await run.push_kinds(run.group("a", b"other")) == ["duplicate"]
        await run.fill("b")
        assert await run.bodies(await run.batch(0)) == [b"kept", b"body-b"]
        # One payload each, none of a first try that came to nothing.
        await run.check()
        await store.close()
