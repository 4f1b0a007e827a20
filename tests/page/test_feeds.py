"""Tests of who reads a run for those that watch it, and what they are told; over a store that is made up."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest

from buffer_service.admin import event_stream, feeds
from buffer_service.admin.event_stream import EventStream
from buffer_service.admin.feeds import Feeds, Told
from buffer_service.domain.command import Command
from buffer_service.observability.diagnosis import SILENT_MS
from buffer_service.security.gate import Anybody
from buffer_wire.errors import NotReady, StoreUnavailable, Unauthenticated, UnknownRun
from tests.support.views import make_engines, make_view

if TYPE_CHECKING:
    from buffer_service.domain.ports import RunStore

DEADLINE_S = 60.0


class Shelf:
    """A store of one view, that counts how often it is looked at."""

    def __init__(self) -> None:
        self.kept = make_view(engines=make_engines(1))
        self.error: Exception | None = None
        self.looks = 0
        self._looked = asyncio.Event()

    async def call(self, command: Command[Any]) -> Any:
        if command.script == "eval_view":
            return 1, []
        assert command.script == "view"
        self.looks += 1
        self._looked.set()
        if self.error is not None:
            raise self.error
        return self.kept

    def change(self) -> None:
        self.kept = replace(self.kept, next_step=self.kept.next_step + 1)

    async def looked(self, times: int) -> None:
        """Wait until it was looked at so often again."""
        wanted = self.looks + times
        async with asyncio.timeout(DEADLINE_S):
            while self.looks < wanted:
                self._looked.clear()
                await self._looked.wait()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "PERIOD_S", 0.01)
    monkeypatch.setattr(event_stream, "CHECK_S", 0.02)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def made(shelf: Shelf) -> Feeds:
    return Feeds(cast("RunStore", shelf))


async def other_than(feed: feeds.Feed, seen: Told | None) -> Told:
    """The next that is told."""
    async with asyncio.timeout(DEADLINE_S):
        while feed.told is seen:
            await feed.wait(seen, 1)
    assert feed.told is not None
    return feed.told


async def test_one_reads_however_many_watch_and_nobody_when_none_does(shelf: Shelf, made: Feeds) -> None:
    async with contextlib.AsyncExitStack() as stack:
        watched = [await stack.enter_async_context(made.watch("r")) for _ in range(20)]
        assert len({id(feed) for feed in watched}) == 1
        assert made.watched == {"r": 20}
        await shelf.looked(2)
    assert made.watched == {}
    assert watched[0].task is not None
    assert watched[0].task.done()


async def test_only_changes_are_told_and_time_alone_is_none(shelf: Shelf, made: Feeds) -> None:
    async with made.watch("r") as feed:
        first = feed.told
        shelf.kept = replace(shelf.kept, engines=make_engines(1, silent_ms=20))
        await shelf.looked(3)
        assert feed.told is first
        shelf.change()
        second = await other_than(feed, first)
        assert json.loads(second.data)["run"]["next_step"] == 1


@pytest.mark.parametrize("silent_ms", [5_000, SILENT_MS])
async def test_an_engine_that_was_heard_or_fell_silent_is_a_change(shelf: Shelf, made: Feeds, silent_ms: int) -> None:
    async with made.watch("r") as feed:
        first = feed.told
        shelf.kept = replace(shelf.kept, engines=make_engines(1, silent_ms=silent_ms))
        told = json.loads((await other_than(feed, first)).data)
        assert told["run"]["engines"][0]["silent_ms"] == silent_ms


async def test_a_store_that_fails_is_told_once_and_the_state_again_when_it_is_back(shelf: Shelf, made: Feeds) -> None:
    async with made.watch("r") as feed:
        first = feed.told
        shelf.error = StoreUnavailable("unix:///s", "connection refused")
        fault = await other_than(feed, first)
        assert (fault.event, json.loads(fault.data)["reason"]) == ("fault", "store_unavailable")
        await shelf.looked(3)
        assert feed.told is fault
        shelf.error = None
        assert (await other_than(feed, fault)).event == "run"


async def test_whatever_else_goes_wrong_ends_it(shelf: Shelf, made: Feeds) -> None:
    async with made.watch("r") as feed:
        first = feed.told
        shelf.error = ZeroDivisionError()
        assert (await other_than(feed, first)).event == "end"
    shelf.error = None
    async with made.watch("r") as feed:
        assert feed.told is not None
        assert feed.told.event == "run"


async def test_a_run_that_is_not_there_and_a_service_that_stops_are_refused(shelf: Shelf, made: Feeds) -> None:
    shelf.error = UnknownRun("r")
    with pytest.raises(UnknownRun):
        await made.watch("r").__aenter__()
    shelf.error = None
    async with made.watch("r") as feed:
        first = feed.told
        made.stop()
        end = await other_than(feed, first)
        assert end.event == "end"
        shelf.change()
        await shelf.looked(3)
        assert feed.told is end, "it stays the end"
    with pytest.raises(NotReady):
        await made.watch("r").__aenter__()


async def test_there_is_an_end_to_how_many_watch(monkeypatch: pytest.MonkeyPatch, made: Feeds) -> None:
    monkeypatch.setattr(feeds, "MAX_WATCHERS", 2)
    async with made.watch("r"), made.watch("r"):
        with pytest.raises(NotReady, match="2 pages watch"):
            await made.watch("r").__aenter__()
    async with made.watch("r"), made.watch("r"):
        pass


async def test_one_token_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch, made: Feeds) -> None:
    monkeypatch.setattr(feeds, "MAX_OF_TOKEN", 2)
    async with made.watch("r", "greedy"), made.watch("s", "greedy"):
        with pytest.raises(NotReady, match="2 pages with token 'greedy' watch"):
            await made.watch("r", "greedy").__aenter__()
        async with made.watch("r", "other"), made.watch("r"), made.watch("r"), made.watch("r"):
            pass
    async with made.watch("r", "greedy"), made.watch("r", "greedy"):
        pass


class Revocable(Anybody):
    """A caller whose token can be revoked."""

    revoked = False

    def check_live(self) -> None:
        if self.revoked:
            raise Unauthenticated("token 'reader' was revoked")


async def texts(made: Feeds, caller: Anybody, last_event_id: str = "") -> AsyncGenerator[str, None]:
    """Return what one stream sends."""
    async with made.watch("r") as feed:
        async for text in EventStream(made, "r", caller, last_event_id)._messages(feed):
            yield text


async def test_the_stream_says_that_it_lives(monkeypatch: pytest.MonkeyPatch, made: Feeds) -> None:
    monkeypatch.setattr(event_stream, "HEARTBEAT_S", 0.05)
    async with asyncio.timeout(DEADLINE_S), contextlib.aclosing(texts(made, Anybody())) as stream:
        said = [await anext(stream) for _ in range(4)]
    assert said[0] == "retry: 2000\n\n"
    assert said[1].startswith("id: ")
    assert said[2:] == [": nothing changed\n\n"] * 2


async def test_nothing_follows_a_revoked_token_but_the_end(shelf: Shelf, made: Feeds) -> None:
    caller = Revocable()
    async with asyncio.timeout(DEADLINE_S), contextlib.aclosing(texts(made, caller)) as stream:
        await anext(stream)
        await anext(stream)
        caller.revoked = True
        shelf.change()
        rest = [text async for text in stream]
    assert len(rest) == 1
    assert rest[0].startswith("event: end\ndata: ")
    assert "unauthenticated" in rest[0]


async def test_names_with_line_ends_stay_in_their_line(shelf: Shelf, made: Feeds) -> None:
    engine = replace(make_engines(1)[0], engine_id="a\n\ndata: {}\r\nevent: end")
    shelf.kept = replace(shelf.kept, engines=[engine])
    async with made.watch("r") as feed:
        assert feed.told is not None
        assert "\n" not in feed.told.data
        assert "\r" not in feed.told.data
        assert json.loads(feed.told.data)["run"]["engines"][0]["engine_id"] == engine.engine_id


async def test_who_takes_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch, made: Feeds) -> None:
    monkeypatch.setattr(event_stream, "SEND_S", 0.05)

    async def receive() -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def send(_: object) -> None:
        await asyncio.Event().wait()

    async with asyncio.timeout(DEADLINE_S):
        await EventStream(made, "r", Anybody())({"type": "http"}, receive, send)
    assert made.watched == {}
