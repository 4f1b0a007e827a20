"""Tests of the tickets of notifications: they are bounded however many runs come and go, and no change is missed."""

import asyncio
from typing import Any

import pytest

from buffer_service.domain.ports import Topic
from buffer_service.store import notifications
from buffer_service.store.notifications import MOST_LACKING, MOST_TICKETS, StoreNotifications


class Nowhere:
    """Source that nobody connects to."""

    async def connect(self, on_push: Any = None) -> Any:
        raise NotImplementedError


@pytest.fixture
def notes() -> StoreNotifications:
    return StoreNotifications(Nowhere())


async def test_runs_that_are_gone_leave_nothing_that_grows(notes: StoreNotifications) -> None:
    for number in range(MOST_TICKETS):
        for topic in Topic:
            notes.raise_ticket(f"run-{number}", topic.value)
        notes.lacks(f"run-{number}", 1)
    assert len(notes._tickets) <= MOST_TICKETS
    assert len(notes._lacking) <= MOST_LACKING


async def test_a_change_is_noticed_whatever_was_forgotten_since_the_ticket_was_taken(
    notes: StoreNotifications, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "MOST_TICKETS", 4)
    notes.raise_ticket("r", "groups")
    seen = notes.ticket("r", Topic.GROUPS)
    notes.raise_ticket("r", "groups")
    for number in range(20):
        notes.raise_ticket(f"other-{number}", "groups")
        assert notes.ticket("r", Topic.GROUPS) > seen
    seen = notes.ticket("r", Topic.GROUPS)
    notes.raise_ticket("r", "groups")
    assert await notes.wait("r", Topic.GROUPS, seen, 10) > seen


async def test_changes_of_other_runs_end_no_wait(notes: StoreNotifications) -> None:
    seen = notes.ticket("r", Topic.GROUPS)
    waiting = asyncio.create_task(notes.wait("r", Topic.GROUPS, seen, 30))
    await asyncio.sleep(0)
    notes.raise_ticket("other", "groups")
    notes.raise_ticket("r", "space")
    await asyncio.sleep(0)
    assert not waiting.done()
    assert notes.ticket("r", Topic.GROUPS) == seen
    notes.raise_ticket("r", "groups")
    assert await waiting > seen
