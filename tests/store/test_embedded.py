"""The embedded store: one service per folder, found again with its data, dead with its parent."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from buffer_service.settings import Durability
from buffer_service.store.embedded.data_directory import DataDirectory
from buffer_service.store.embedded.server import EmbeddedStore
from buffer_service.store.redis_store import RedisRunStore
from buffer_wire.errors import StoreUnavailable, StoreUnsuitable
from tests.store.driver import Run


@contextlib.asynccontextmanager
async def connected(embedded: EmbeddedStore) -> AsyncIterator[Run]:
    store = await RedisRunStore.connect(embedded.url)
    try:
        yield Run(store)
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def started(
    folder: Path, durability: Durability = Durability.PROCESS, binary: str | None = None
) -> AsyncIterator[EmbeddedStore]:
    embedded = EmbeddedStore(folder, durability=durability, binary=binary, start_timeout_s=20)
    await embedded.start()
    try:
        yield embedded
    finally:
        await embedded.stop()


def alive(pid: int) -> bool:
    """Tell whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_dead(pid: int) -> None:
    deadline = time.monotonic() + 20
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("durability", [Durability.PROCESS, Durability.HOST])
async def test_data_is_found_again_after_a_restart(tmp_path: Path, durability: Durability) -> None:
    async with started(tmp_path / "new" / "folder", durability) as embedded, connected(embedded) as run:
        await run.create()
        await run.fill("a", "b")
    async with started(tmp_path / "new" / "folder", durability) as embedded, connected(embedded) as run:
        assert await run.bodies(await run.batch(0)) == [b"body-a", b"body-b"]


async def test_the_memory_level_keeps_nothing(tmp_path: Path) -> None:
    async with started(tmp_path, Durability.MEMORY) as embedded, connected(embedded) as run:
        await run.create()
    async with started(tmp_path, Durability.MEMORY) as embedded, connected(embedded) as run:
        assert list(await run.store.list_runs()) == []
    assert not (tmp_path / "appendonlydir").exists()


@pytest.mark.parametrize(
    ("durability", "appendonly", "appendfsync"),
    [(Durability.MEMORY, b"no", None), (Durability.PROCESS, b"yes", b"no"), (Durability.HOST, b"yes", b"always")],
)
async def test_each_level_sets_the_server_as_it_says(
    tmp_path: Path, durability: Durability, appendonly: bytes, appendfsync: bytes | None
) -> None:
    async with started(tmp_path, durability) as embedded, connected(embedded) as run:
        assert (await run.command("CONFIG", "GET", "appendonly"))[1] == appendonly
        assert (await run.command("CONFIG", "GET", "save"))[1] == b""
        assert (await run.command("CONFIG", "GET", "maxmemory-policy"))[1] == b"noeviction"
        if appendfsync is not None:
            assert (await run.command("CONFIG", "GET", "appendfsync"))[1] == appendfsync


@pytest.mark.faults
async def test_nothing_acknowledged_is_lost_when_the_server_is_killed(tmp_path: Path) -> None:
    acknowledged: list[str] = []
    async with started(tmp_path) as embedded, connected(embedded) as run:
        await run.create(max_queued_groups=100_000)

        enough = asyncio.Event()

        async def push_until_killed(pusher: int) -> None:
            with contextlib.suppress(StoreUnavailable):
                for number in range(100_000):
                    await run.fill(name := f"t{pusher}-{number}")
                    acknowledged.append(name)
                    if len(acknowledged) == 400:
                        enough.set()

        async with asyncio.TaskGroup() as group:
            for pusher in range(4):
                group.create_task(push_until_killed(pusher))
            await enough.wait()
            assert embedded.pid is not None
            os.kill(embedded.pid, signal.SIGKILL)
        assert await embedded.wait() == -signal.SIGKILL
    async with started(tmp_path) as embedded, connected(embedded) as run:
        queued = {group_id.removesuffix("/0") for group_id in await run.queue()}
        assert queued >= set(acknowledged)
        await run.check()
        keys = sorted(await run.living_keys())
        assert None not in await run.store.fetch(run.run_id, keys)


@pytest.mark.faults
@pytest.mark.parametrize("long", [False, True])
async def test_a_server_that_died_is_started_again_at_the_same_address(tmp_path: Path, long: bool) -> None:
    folder = tmp_path / ("x" * 120 if long else "x")
    async with started(folder) as embedded, connected(embedded) as run:
        await run.create()
        url, first = embedded.url, embedded.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await embedded.wait()
        await embedded.restart()
        assert (embedded.url, embedded.pid == first) == (url, False)
        await run.fill("a", "b")
        assert list(await run.store.list_runs()) == [run.run_id]


PARENT = """
import asyncio, json, sys
from pathlib import Path
from buffer_service.domain.policy import RunPolicy
from buffer_service.store.embedded.server import EmbeddedStore
from buffer_service.store.redis_store import RedisRunStore

async def main():
    embedded = EmbeddedStore(Path(sys.argv[1]))
    await embedded.start()
    store = await RedisRunStore.connect(embedded.url)
    await store.create_run("kept", RunPolicy())
    print(json.dumps(embedded.pid), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.faults
async def test_the_server_dies_with_its_parent_and_the_folder_is_free_again(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert parent.stdout is not None
        server_pid = json.loads(await parent.stdout.readline())
        with pytest.raises(StoreUnsuitable, match=f"in use by process {parent.pid}"):
            await EmbeddedStore(tmp_path).start()
        assert alive(server_pid)
    finally:
        parent.kill()
        await parent.wait()
    # At once: the old server may still be on its way out.
    async with started(tmp_path) as embedded, connected(embedded) as run:
        assert list(await run.store.list_runs()) == ["kept"]
    wait_until_dead(server_pid)


async def test_stop_leaves_no_process_and_no_socket(tmp_path: Path) -> None:
    async with started(tmp_path) as embedded:
        pid = embedded.pid
        assert pid is not None
        assert embedded.socket_path.is_socket()
    assert not alive(pid)
    assert not embedded.socket_path.exists()
    assert embedded.pid is None
    (await DataDirectory.acquire(tmp_path, wait_s=0)).release()


async def test_a_long_path_moves_the_socket_and_says_why(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    async with started(folder) as embedded, connected(embedded) as run:
        assert folder not in embedded.socket_path.parents
        assert "longer than" in embedded.socket_note
        socket_folder = embedded.socket_path.parent
        await run.create()
    assert not socket_folder.exists()
    assert (folder / "appendonlydir").is_dir()


async def test_a_server_that_does_not_come_up_shows_its_log(tmp_path: Path) -> None:
    async with started(tmp_path) as embedded, connected(embedded) as run:
        await run.create()
    (manifest,) = (tmp_path / "appendonlydir").glob("*.manifest")
    manifest.write_text("nonsense\n")
    with pytest.raises(StoreUnavailable) as failure:
        await EmbeddedStore(tmp_path, start_timeout_s=20).start()
    assert "ended with code 1" in failure.value.message
    assert "manifest" in failure.value.message
    (await DataDirectory.acquire(tmp_path, wait_s=0)).release()


async def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnsuitable, match="cannot be used"):
        await EmbeddedStore(tmp_path / "file" / "folder").start()


@pytest.mark.redis7
async def test_a_redis_server_will_do_as_well(tmp_path: Path) -> None:
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("there is no redis-server on PATH")
    async with started(tmp_path, binary=binary) as embedded, connected(embedded) as run:
        await run.create()
        await run.fill("a", "b")
        await run.batch(0)
        await run.check()


def test_the_embedded_store_never_imports_grpc() -> None:
    probe = (
        "import sys, buffer_service.store.embedded.server, buffer_service.store.redis_store;"
        "sys.exit('grpc' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, cwd=Path.cwd())
