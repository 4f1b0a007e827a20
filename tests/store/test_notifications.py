"""Hints: what raises which ticket, reconnects, timeouts."""

import asyncio
import time

import pytest

from buffer_service import commands
from buffer_service.domain.policy import OverflowAction, RunPolicy
from buffer_service.domain.ports import Topic
from tests.store.driver import Run
from tests.support.store_server import StoreServer


async def settled(run: Run) -> None:
    """The listener listens, and has heard everything that was published before."""
    notifications = run.store.notifications
    seen = notifications.ticket("probe", Topic.GROUPS)
    while seen == notifications.ticket("probe", Topic.GROUPS):
        await run.command("PUBLISH", "rb:{probe}:notify", "groups")
        await notifications.wait("probe", Topic.GROUPS, seen, 0.05)


async def raised_by(run: Run, operation: object) -> set[str]:
    """Topics whose ticket an operation raises."""
    await settled(run)
    before = {topic: run.store.notifications.ticket(run.run_id, topic) for topic in Topic}
    await operation  # type: ignore[misc]
    await settled(run)
    return {
        str(topic) for topic, ticket in before.items() if run.store.notifications.ticket(run.run_id, topic) > ticket
    }


async def test_operations_raise_the_tickets_of_those_who_wait_for_them(run: Run) -> None:
    await run.create()
    assert await raised_by(run, run.submit("a", "b")) == {"tasks"}
    grants = (await run.lease(2)).grants
    # Pulls are told when a batch is there, not of each of its groups.
    assert await raised_by(run, run.push(run.group(grants[0]))) == {"tasks"}
    assert await raised_by(run, run.give_back(grants[1])) == {"tasks"}
    assert await raised_by(run, run.pull(0)) == set()
    assert await raised_by(run, run.fill("c")) == {"groups"}
    assert await raised_by(run, run.pull(0)) == {"space", "tasks"}
    assert await raised_by(run, run.pull(0)) == set()
    assert await raised_by(run, run.commit(0)) == set()
    assert "weights" in await raised_by(run, run.publish(1))
    assert await raised_by(run, run.resume()) == {"groups", "tasks", "space", "weights"}
    changed = RunPolicy(batch_groups=2, overflow_action=OverflowAction.BLOCK)
    assert {"groups", "tasks", "space"} <= await raised_by(
        run, run.store.call(commands.update_policy(run.run_id, changed))
    )
    await run.pass_ms(60_001)
    await run.lease()
    await run.pass_ms(60_001)
    assert await raised_by(run, run.store.sweep()) == {"tasks"}


async def test_a_change_between_ticket_and_wait_is_not_missed(run: Run) -> None:
    await run.create()
    await settled(run)
    seen = run.store.notifications.ticket(run.run_id, Topic.TASKS)
    await run.submit("a")
    assert await run.store.notifications.wait(run.run_id, Topic.TASKS, seen, 5) > seen


async def test_a_wait_ends_at_its_timeout(run: Run) -> None:
    await run.create()
    await settled(run)
    seen = run.store.notifications.ticket(run.run_id, Topic.SPACE)
    began = time.monotonic()
    assert await run.store.notifications.wait(run.run_id, Topic.SPACE, seen, 0.05) == seen
    assert 0.04 < time.monotonic() - began < 2
    assert not run.store.notifications._waiters


async def test_all_waiters_of_a_topic_wake_first_come_first_served(run: Run) -> None:
    await run.create()
    await settled(run)
    woken: list[int] = []

    async def wait(number: int) -> None:
        await run.store.notifications.wait(run.run_id, Topic.TASKS, seen, 5)
        woken.append(number)

    seen = run.store.notifications.ticket(run.run_id, Topic.TASKS)
    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(wait(number))
        await asyncio.sleep(0)
        await run.submit("a")
    assert woken == list(range(20))


@pytest.mark.faults
async def test_a_reconnect_raises_every_ticket(run: Run, server: StoreServer) -> None:
    await run.create()
    await settled(run)
    seen = run.store.notifications.ticket(run.run_id, Topic.WEIGHTS)
    await run.command("CLIENT", "KILL", "TYPE", "pubsub")
    assert await run.store.notifications.wait(run.run_id, Topic.WEIGHTS, seen, 10) > seen
    await settled(run)
    again = run.store.notifications.ticket(run.run_id, Topic.TASKS)
    await run.submit("a")
    assert await run.store.notifications.wait(run.run_id, Topic.TASKS, again, 5) > again
