"""A store's append-only file on a disk that fills up twice after the file was rewritten."""

import asyncio
import errno
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import structlog

from buffer_service.store.embedded.server import EmbeddedStore
from buffer_service.store.redis_store import RedisRunStore
from buffer_service.supervisor import append_only
from buffer_wire.errors import StoreOutOfDisk, StoreUnavailable
from tests.store.driver import Run
from tests.support.store_server import StoreServer, store_server

SOON_S = 30.0


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with store_server("--appendonly", "yes", "--appendfsync", "no") as running:
        yield running


@pytest.fixture
async def embedded(tmp_path: Path) -> AsyncIterator[EmbeddedStore]:
    embedded = EmbeddedStore(tmp_path)
    await embedded.start()
    yield embedded
    await embedded.stop()


async def rewrite(run: Run, folder: Path) -> None:
    """Have the file written anew, until the former one is gone."""
    former = files(folder)
    await run.command("BGREWRITEAOF")
    async with asyncio.timeout(SOON_S):
        while former & files(folder) or len(files(folder)) != 1:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)


def files(folder: Path) -> set[str]:
    return {file.name for file in folder.rglob("*.aof")}


async def until_there(run: Run) -> None:
    """The server looks once a second whether it can append again; connections of before a restart are found out."""
    async with asyncio.timeout(SOON_S):
        while True:
            try:
                await run.view()
                await run.command("SET", "again", 1)
                await run.store.push(run.run_id, [])
                return
            except (StoreOutOfDisk, StoreUnavailable):
                await asyncio.sleep(0.05)


async def test_what_is_acknowledged_between_two_full_disks_is_there_after_a_kill(server: StoreServer) -> None:
    store = await RedisRunStore.connect(server.url, timeout_s=10)
    run = Run(store)
    await run.create(max_queued_groups=100)
    await run.fill("before")
    await rewrite(run, server.folder)
    assert server.process is not None
    append_only.append_always(server.process.pid)
    for name in ("first", "second"):
        server.fill_disk(left=50)
        with pytest.raises(StoreOutOfDisk):
            await run.push(run.group(f"{name}-refused", b"x" * 500))
        server.free_disk()
        await until_there(run)
        await run.fill(name)
    server.kill()
    server.start()
    await until_there(run)
    assert await run.push_kinds(*(run.group(name) for name in ("before", "first", "second"))) == ["duplicate"] * 3
    assert (await run.view()).paused == ""
    await run.check()
    await store.close()


async def test_the_file_of_every_rewrite_and_of_every_life_is_appended_to(
    embedded: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int | None] = []
    monkeypatch.setattr(append_only, "append_always", seen.append)
    monkeypatch.setattr(append_only, "POLL_S", 0.01)
    watch = asyncio.create_task(append_only.watch(embedded))

    async def until_seen(count: int, pid: int | None) -> None:
        async with asyncio.timeout(SOON_S):
            while seen.count(pid) < count:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)

    store = await RedisRunStore.connect(embedded.url, embedded=True)
    run = Run(store)
    await run.create()
    first = embedded.pid
    assert first is not None
    await until_seen(1, first)
    await rewrite(run, embedded.data_dir)
    await until_seen(2, first)
    os.kill(first, signal.SIGKILL)
    await embedded.wait()
    await embedded.restart()
    await until_seen(1, embedded.pid)
    watch.cancel()
    await store.close()


@pytest.mark.parametrize("why", [errno.EPERM, errno.ENOSYS])
async def test_who_cannot_set_the_flag_is_told_once_and_goes_on(
    embedded: EmbeddedStore, monkeypatch: pytest.MonkeyPatch, why: int
) -> None:
    # What vanishes while it is looked at is looked at again; what is refused stays refused.
    answers = iter([errno.EBADF, errno.ESRCH, why])

    def refused(_: int) -> None:
        raise OSError(next(answers), "")

    monkeypatch.setattr(append_only, "append_always", refused)
    monkeypatch.setattr(append_only, "POLL_S", 0.01)
    with structlog.testing.capture_logs() as logs:
        async with asyncio.timeout(SOON_S):
            await append_only.watch(embedded)
    (warning,) = logs
    assert "--durability host" in str(warning)
