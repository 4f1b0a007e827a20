"""One follower for all who watch a run: what is read and serialized once, and how watches end."""

import asyncio
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest
from prometheus_client import CollectorRegistry

from buffer_service.domain import ops
from buffer_service.observability.metrics import RpcMetrics
from buffer_service.rpc.flow.ages import StreamAges
from buffer_service.rpc.flow.drain import Drain
from buffer_service.rpc.flow.waiting import WaitingLines
from buffer_service.rpc.streams.weights import WeightsFeed
from buffer_wire.errors import NotReady, UnknownRun
from buffer_wire.revision import NO_REVISION
from rollout_buffer.v1 import weights_pb2
from tests.service.test_waits_of_a_process import Notes, settled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buffer_service.domain.ports import RunStore


class Published:
    """Store whose weights a test changes."""

    def __init__(self) -> None:
        self.view = ops.WeightsView(NO_REVISION, ops.WeightVersion(1, 0), b"", paused=False)
        self.readings = 0
        self.trouble: Exception | None = None

    async def call(self, _command: object) -> ops.WeightsView:
        self.readings += 1
        await asyncio.sleep(0)
        if self.trouble is not None:
            raise self.trouble
        return self.view


class Scene:
    """A feed over a store, and watches of it."""

    def __init__(self) -> None:
        self.store, self.notes, self.drain = Published(), Notes(), Drain()
        lines = WaitingLines(self.notes, self.drain)
        ages = StreamAges(0.0, RpcMetrics(CollectorRegistry()))
        self.feed = WeightsFeed(cast("RunStore", self.store), lines, ages)

    def publish(self, version: int, *, may_load: bool = True) -> None:
        self.store.view = replace(self.store.view, published=ops.WeightVersion(1, version), may_load=may_load)
        self.notes.notify()

    @contextmanager
    def watching(self, number: int) -> "Iterator[list[Watch]]":
        watches = [Watch(self.feed) for _ in range(number)]
        yield watches
        for watch in watches:
            watch.task.cancel()


class Watch:
    """One watch, and what it was told."""

    def __init__(self, feed: WeightsFeed) -> None:
        self.told: list[bytes] = []
        self.task = asyncio.create_task(self._run(feed))

    async def _run(self, feed: WeightsFeed) -> None:
        async with aclosing(feed.messages("r")) as messages:
            async for message in messages:
                self.told.append(message)

    @property
    def versions(self) -> list[int]:
        return [weights_pb2.WatchWeightsResponse.FromString(message).published.version for message in self.told]


async def test_a_change_is_read_and_serialized_once_for_all() -> None:
    scene = Scene()
    with scene.watching(8) as watches:
        await settled()
        assert scene.store.readings == 1
        scene.publish(1)
        await settled()
        assert scene.store.readings == 2
        assert {tuple(watch.versions) for watch in watches} == {(0, 1)}
        assert len({id(watch.told[1]) for watch in watches}) == 1


async def test_a_hint_without_a_change_wakes_nobody_and_room_for_a_load_does() -> None:
    scene = Scene()
    with scene.watching(2) as watches:
        await settled()
        scene.notes.notify()
        await settled()
        scene.publish(0, may_load=False)
        await settled()
        assert [watch.versions for watch in watches] == [[0], [0]]
        scene.publish(0, may_load=True)
        await settled()
        assert [watch.versions for watch in watches] == [[0, 0], [0, 0]]


async def test_who_comes_later_is_told_what_is_published_then() -> None:
    scene = Scene()
    with scene.watching(1):
        await settled()
        scene.publish(1)
        with scene.watching(1) as later:
            await settled()
            assert later[0].versions == [1]


async def test_a_run_that_is_gone_ends_all_watches_and_a_new_one_is_followed_anew() -> None:
    scene = Scene()
    with scene.watching(3) as watches:
        await settled()
        scene.store.trouble = UnknownRun("r")
        scene.notes.notify()
        for watch in watches:
            with pytest.raises(UnknownRun):
                await watch.task
    scene.store.trouble = None
    with scene.watching(1) as again:
        await settled()
        scene.publish(2)
        await settled()
        assert again[0].versions == [0, 2]


async def test_watches_end_when_the_process_does() -> None:
    scene = Scene()
    with scene.watching(3) as watches:
        await settled()
        scene.drain.begin()
        for watch in watches:
            with pytest.raises(NotReady):
                await watch.task


async def test_nobody_follows_a_run_that_nobody_watches() -> None:
    scene = Scene()
    before = asyncio.all_tasks()
    with scene.watching(2) as watches:
        await settled()
    await asyncio.gather(*(watch.task for watch in watches), return_exceptions=True)
    await settled()
    assert asyncio.all_tasks() == before
    scene.notes.notify()
    await settled()
    assert scene.store.readings == 1
