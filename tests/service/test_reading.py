"""Tests of what becomes of the other runs when one cannot be read, or there are more than there is time for."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import pytest
from structlog.testing import capture_logs

from buffer_service.admin.reading import RunReader
from buffer_service.security.gate import CALLER, Anybody
from buffer_wire.errors import LayoutChanged, StoreFault, StoreUnavailable, UnknownRun

if TYPE_CHECKING:
    from buffer_service.domain.ports import RunStore

LONG_S = 60.0


@pytest.fixture(autouse=True)
def _called_by_anybody() -> Iterator[None]:
    token = CALLER.set(Anybody())
    yield
    CALLER.reset(token)


class Shelf:
    """A store of runs, of which some cannot be read; `hangs`: the one that is never answered."""

    def __init__(self, run_ids: Sequence[str], errors: Mapping[str, Exception] | None = None, hangs: str = "") -> None:
        self.run_ids = run_ids
        self.errors = errors or {}
        self.hangs = hangs

    async def list_runs(self) -> Sequence[str]:
        return self.run_ids

    async def name(self, run_id: str) -> str:
        if run_id == self.hangs:
            await asyncio.Event().wait()
        if run_id in self.errors:
            raise self.errors[run_id]
        return run_id


def reader_of(shelf: Shelf) -> RunReader:
    return RunReader(cast("RunStore", shelf))


def within(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_a_run_that_cannot_be_read_is_left_out_alone_and_named_once() -> None:
    shelf = Shelf(
        ["a", "broken", "c", "deleted", "odd", "theirs", "z"],
        {
            "odd": TypeError("float"),
            "theirs": LayoutChanged("9", "8"),
            "broken": StoreFault("WRONGTYPE"),
            "deleted": UnknownRun("deleted"),
        },
    )
    reader = reader_of(shelf)
    with capture_logs() as logs:
        for _ in range(3):
            runs = await reader.read(shelf.name, within(LONG_S))
            assert list(runs.found) == ["a", "c", "z"]
            assert runs.unread == {"broken": "store_fault", "odd": "defect", "theirs": "layout_changed"}
    told = [(line["run"], line["reason"]) for line in logs]
    assert told == [("broken", "store_fault"), ("odd", "defect"), ("theirs", "layout_changed")]

    shelf.errors = {}
    assert (await reader.read(shelf.name, within(LONG_S))).unread == {}
    shelf.errors = {"theirs": LayoutChanged("9", "8")}
    with capture_logs() as logs:
        await reader.read(shelf.name, within(LONG_S))
    assert len(logs) == 1, "it was readable in between"


async def test_runs_that_there_is_no_time_for_are_late_and_the_others_are_there() -> None:
    shelf = Shelf([f"r{i:03}" for i in range(300)], hangs="r120")
    with capture_logs() as logs:
        runs = await reader_of(shelf).read(shelf.name, within(0.2))
    assert list(runs.found) == shelf.run_ids[:120]
    assert runs.unread == dict.fromkeys(shelf.run_ids[120:], "late")
    assert [(line["run"], line["more"]) for line in logs] == [("r120", 179)]


async def test_a_store_that_answers_for_no_run_fails() -> None:
    shelf = Shelf(["a", "b"], hangs="a")
    with pytest.raises(StoreFault, match="did not answer within"):
        await reader_of(shelf).read(shelf.name, within(0.1))


async def test_a_store_that_goes_away_fails_however_many_it_has_answered_for() -> None:
    shelf = Shelf(["a", "b"], {"b": StoreUnavailable("unix:///s", "connection refused")})
    with pytest.raises(StoreUnavailable):
        await reader_of(shelf).read(shelf.name, within(LONG_S))
