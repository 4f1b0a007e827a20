"""An embedded store whose disk is nearly full: it takes no writes and gives what is there, until there is room."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from buffer_service import commands
from buffer_service.settings import Durability
from buffer_service.store.embedded.server import EmbeddedStore
from buffer_service.store.redis_store import RedisRunStore
from buffer_service.supervisor import disk
from buffer_wire.errors import StoreOutOfDisk
from tests.store.driver import Run

SOON_S = 30.0


class Room:
    """Space that the disk is said to have left."""

    def __init__(self) -> None:
        self.enough = True

    def __call__(self, _: EmbeddedStore) -> bool:
        return self.enough


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    room = Room()
    monkeypatch.setattr(disk, "has_room", room)
    monkeypatch.setattr(disk, "POLL_S", 0.01)
    return room


@pytest.fixture(params=[Durability.PROCESS, Durability.HOST])
async def embedded(request: pytest.FixtureRequest, tmp_path: Path, room: Room) -> AsyncIterator[EmbeddedStore]:
    assert room.enough
    embedded = EmbeddedStore(tmp_path, durability=request.param)
    await embedded.start()
    watch = asyncio.create_task(disk.watch(embedded))
    yield embedded
    watch.cancel()
    await embedded.stop()


async def until(embedded: EmbeddedStore, *, refuses: bool) -> None:
    async with asyncio.timeout(SOON_S):
        while embedded.refuses_writes != refuses:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)


async def test_writes_are_refused_by_name_and_batches_that_are_there_are_given(
    embedded: EmbeddedStore, room: Room
) -> None:
    store = await RedisRunStore.connect(embedded.url, embedded=True)
    run = Run(store)
    await run.create()
    await run.fill("a", "b", "c", "d")
    before = await run.batch(0)
    room.enough = False
    await until(embedded, refuses=True)
    for attempt in (lambda: run.push(run.group("e")), lambda: run.submit("t"), lambda: run.publish(1)):
        with pytest.raises(StoreOutOfDisk, match="full but for a reserve"):
            await attempt()
    again = await run.batch(0)
    assert (again.shard, await run.bodies(again)) == (before.shard, await run.bodies(before))

    await embedded.stop()
    await embedded.start()
    other = await RedisRunStore.connect(embedded.url, embedded=True)
    assert (await other.call(commands.view(run.run_id))).paused == "", (
        "a new life refuses too, and is looked at all the same"
    )
    with pytest.raises(StoreOutOfDisk):
        await other.push(run.run_id, [run.group("e")])
    room.enough = True
    await until(embedded, refuses=False)
    assert [outcome.kind.value for outcome in (await other.push(run.run_id, [run.group("e")])).outcomes] == ["queued"]
    await other.close()
    await store.close()


async def test_small_disks_are_reserved_a_part_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedded = EmbeddedStore(tmp_path)
    assert disk.has_room(embedded)
    monkeypatch.setattr(disk, "LARGEST_SHARE", 1)
    monkeypatch.setattr(disk, "RESERVE_BYTES", 1 << 60)
    assert not disk.has_room(embedded), "all of the disk is in reserve, and something lies on it"
    assert disk.has_room(EmbeddedStore(tmp_path / "none")), "nobody can tell"
