"""Waits for tasks of evaluations: what a wait that hears nothing costs the store, and that a hint ends it."""

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from buffer_service.domain import ops
from buffer_service.rpc.flow.drain import Drain
from buffer_service.rpc.flow.leasing import Leasing
from buffer_service.rpc.flow.waiting import WaitingLines
from buffer_wire.revision import NO_REVISION
from tests.service.test_waits_of_a_process import Notes, settled

if TYPE_CHECKING:
    from buffer_service.domain.ports import RunStore

ASK = cast("ops.LeaseAsk", SimpleNamespace(sink=ops.TaskSink.EVALUATIONS))


class Evaluations:
    """Store with tasks of evaluations, or without."""

    def __init__(self) -> None:
        self.grants: list[str] = []
        self.tries = 0

    async def lease(self, _run_id: str, _ask: object, *, seen_revision: object) -> object:
        self.tries += 1
        wait = None if self.grants else ops.LeaseWait.NO_TASKS
        return SimpleNamespace(grants=self.grants, wanted=None, wait=wait)


async def test_a_wait_that_hears_nothing_asks_the_store_once() -> None:
    store = Evaluations()
    leasing = Leasing(cast("RunStore", store), WaitingLines(Notes(), Drain()))
    leased = await leasing.leased("r", ASK, NO_REVISION, wait_s=0.05)
    assert (leased.grants, store.tries) == ([], 1)


async def test_a_hint_has_all_who_wait_try_again() -> None:
    store, notes = Evaluations(), Notes()
    leasing = Leasing(cast("RunStore", store), WaitingLines(notes, Drain()))
    waits = [asyncio.create_task(leasing.leased("r", ASK, NO_REVISION, wait_s=30)) for _ in range(3)]
    await settled()
    store.grants = ["task"]
    notes.notify()
    leased = await asyncio.gather(*waits)
    assert [list(map(str, each.grants)) for each in leased] == [["task"]] * 3
    assert store.tries == 6
