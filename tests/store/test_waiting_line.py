"""Pushes that wait for room: the line over all replicas, and the quotas of a run."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.policy import OverflowAction, RunPolicy
from buffer_service.domain.ports import Topic
from buffer_service.store.redis_store import RedisRunStore
from buffer_wire.errors import StoreOutOfMemory
from tests.store.driver import Run, beside

BLOCK, REJECT, DROP = OverflowAction.BLOCK, OverflowAction.REJECT, OverflowAction.DROP_OLDEST


class Waiter:
    """A group that was blocked, at one replica."""

    def __init__(self, run: Run, store: RedisRunStore, group: ops.NewGroup, key: str) -> None:
        self._run = run
        self._store = store
        self._group = group
        self.key = key

    @classmethod
    async def push(cls, run: Run, store: RedisRunStore, group: ops.NewGroup) -> "Waiter":
        (outcome,) = (await store.push(run.run_id, [group])).outcomes
        assert outcome.kind is ops.PushKind.BLOCKED
        return cls(run, store, group, outcome.payload_key)

    async def retry(self) -> str:
        (outcome,) = (await self._store.retry_push(self._run.run_id, [(self._group.facts, self.key)])).outcomes
        return outcome.kind.value


@pytest.fixture
async def other(store: RedisRunStore) -> AsyncIterator[RedisRunStore]:
    """Another replica."""
    connected = await beside(store)
    yield connected
    await connected.close()


async def test_who_was_blocked_first_is_served_first_whichever_replica_asks(run: Run, other: RedisRunStore) -> None:
    await run.create(batch_groups=1, max_queued_groups=1, overflow_action=BLOCK)
    await run.fill("x")
    first = await Waiter.push(run, run.store, run.group("a"))
    second = await Waiter.push(run, other, run.group("b"))
    third = await Waiter.push(run, run.store, run.group("c"))
    await run.batch(0)
    assert [await waiter.retry() for waiter in (third, second, first)] == ["blocked", "blocked", "queued"]
    await run.batch(1)
    assert [await waiter.retry() for waiter in (third, second)] == ["blocked", "queued"]
    await run.batch(2)
    assert await run.push_kinds(run.group("late")) == ["blocked"]
    assert await third.retry() == "queued"
    assert await run.queue() == ["c/0"]
    await run.check()


async def test_a_waiter_that_does_not_come_again_loses_its_turn(run: Run, other: RedisRunStore) -> None:
    await run.create(batch_groups=1, max_queued_groups=1, overflow_action=BLOCK)
    await run.fill("x")
    lapsed = await Waiter.push(run, run.store, run.group("a"))
    await run.pass_ms(1)
    waiting = await Waiter.push(run, other, run.group("b"))
    await run.batch(0)
    await run.pass_ms(2_999)
    assert await waiting.retry() == "blocked"
    await run.pass_ms(1)
    assert await waiting.retry() == "queued"
    assert await run.members("waiting") == []
    assert await lapsed.retry() == "blocked"
    behind = await Waiter.push(run, other, run.group("c"))
    assert await run.members("waiting") == [lapsed.key, behind.key]
    await run.batch(1)
    assert [await behind.retry(), await lapsed.retry()] == ["blocked", "queued"]
    await run.check()


async def test_a_lapsed_waiter_that_comes_again_goes_to_the_end(run: Run, other: RedisRunStore) -> None:
    await run.create(batch_groups=1, max_queued_groups=1, overflow_action=BLOCK)
    await run.fill("x")
    lapsed = await Waiter.push(run, run.store, run.group("a"))
    await run.pass_ms(1_500)
    waiting = await Waiter.push(run, other, run.group("b"))
    await run.pass_ms(1_501)
    assert await lapsed.retry() == "blocked"
    assert await run.members("waiting") == [waiting.key, lapsed.key]


async def test_small_groups_do_not_overtake_a_large_one(run: Run, other: RedisRunStore) -> None:
    await run.create(overflow_action=BLOCK, max_queued_groups=9, max_queued_tokens=100)
    await run.fill("x", tokens=60)
    large = await Waiter.push(run, run.store, run.group("large", tokens=50))
    small = await Waiter.push(run, other, run.group("small", tokens=1))
    assert [await small.retry(), await large.retry()] == ["blocked", "blocked"]
    await run.store.call(commands.abandon_push(run.run_id, [large.key]))
    assert await small.retry() == "queued"
    await run.check()


async def test_a_ticket_raises_the_revision_and_touching_it_does_not(run: Run) -> None:
    await run.create(batch_groups=1, overflow_action=BLOCK)
    await run.fill("x")
    before = (await run.view()).revision
    waiter = await Waiter.push(run, run.store, run.group("a"))
    assert (await run.view()).revision == before + 1
    await run.pass_ms(500)
    assert await waiter.retry() == "blocked"
    assert (await run.view()).revision == before + 1


async def test_whoever_gets_in_wakes_those_that_still_wait(run: Run, other: RedisRunStore) -> None:
    await run.create(batch_groups=1, max_queued_groups=2, overflow_action=BLOCK)
    await run.fill("x", "y")
    first = await Waiter.push(run, run.store, run.group("a"))
    second = await Waiter.push(run, other, run.group("b"))
    await run.batch(0)
    await run.batch(1)
    ticket = other.notifications.ticket(run.run_id, Topic.SPACE)
    ticket = await other.notifications.wait(run.run_id, Topic.SPACE, ticket, 0.2)
    assert await first.retry() == "queued"
    assert await other.notifications.wait(run.run_id, Topic.SPACE, ticket, 5) > ticket
    assert await second.retry() == "queued"


async def test_whoever_waits_leaves_the_line_with_any_other_answer(run: Run) -> None:
    await run.create(overflow_action=BLOCK)
    await run.fill("x", "y")
    await run.submit("a", "b")
    a, b = (await run.lease(2)).grants
    first, second = [await Waiter.push(run, run.store, run.group(lease)) for lease in (a, b)]
    assert await run.give_back(a, kind=ops.ReturnKind.FAILED) == ["pending"]
    await run.store.call(commands.update_policy(run.run_id, RunPolicy(batch_groups=2, overflow_action=REJECT)))
    assert [await second.retry(), await first.retry()] == ["rejected_full", "rejected_full"]
    assert await run.members("waiting") == []
    await run.check()


async def test_a_large_bundle_keeps_its_order_while_it_waits(run: Run) -> None:
    await run.create(batch_groups=100, overflow_action=BLOCK)
    groups = [run.group(f"t{index}") for index in range(200)]
    outcomes = await run.push(*groups)
    assert [outcome.kind.value for outcome in outcomes] == ["queued"] * 100 + ["blocked"] * 100
    await run.batch(0)
    waiting = [(group.facts, outcome.payload_key) for group, outcome in zip(groups, outcomes, strict=True)][100:]
    again = await run.store.retry_push(run.run_id, waiting)
    assert {outcome.kind.value for outcome in again.outcomes} == {"queued"}
    assert await run.queue() == [f"t{index}/0" for index in range(100, 200)]
    await run.check()


async def test_a_bundle_that_fails_in_the_middle_leaves_nobody_in_the_line(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.create(batch_groups=30, overflow_action=BLOCK)
    calls: list[str] = []
    connection: Any = run.store._connection
    store_and_run = connection.store_and_run

    async def fail_at_the_second(*given: Any) -> ops.Buffer:
        calls.append(given[0].script)
        if len(calls) == 2:
            raise StoreOutOfMemory("the store")
        reply: ops.Buffer = await store_and_run(*given)
        return reply

    monkeypatch.setattr(connection, "store_and_run", fail_at_the_second)
    with pytest.raises(StoreOutOfMemory):
        await run.push(*(run.group(f"t{index}") for index in range(100)))
    assert calls == ["push", "push"]
    assert await run.members("waiting") == []
    assert await run.ledger() == {"accepted": 30, "queued": 30}
    await run.check()
    # Pushed again, what was queued is known and the rest waits in its order.
    again = await run.push_kinds(*(run.group(f"t{index}") for index in range(100)))
    assert again == ["duplicate"] * 30 + ["blocked"] * 70


async def test_a_retry_that_fails_in_the_middle_leaves_everybody_in_the_line(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.create(batch_groups=1, overflow_action=BLOCK)
    await run.fill("x")
    groups = [run.group(f"t{index}") for index in range(70)]
    outcomes = await run.push(*groups)
    waiting = [(group.facts, outcome.payload_key) for group, outcome in zip(groups, outcomes, strict=True)]
    places = await run.members("waiting")
    assert places == [key for _, key in waiting]
    calls: list[str] = []
    run_script = run.store._connection.run

    async def fail_at_the_second(*given: Any, **named: Any) -> ops.Buffer:
        calls.append(given[0].script)
        if len(calls) == 2:
            raise StoreOutOfMemory("the store")
        return await run_script(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(run.store._connection, "run", fail_at_the_second)
        with pytest.raises(StoreOutOfMemory):
            await run.store.retry_push(run.run_id, waiting)
    assert calls == ["push", "push"]
    assert await run.members("waiting") == places
    await run.batch(0)
    again = await run.store.retry_push(run.run_id, waiting)
    assert [outcome.kind.value for outcome in again.outcomes] == ["queued"] + ["blocked"] * 69
    await run.check()


async def test_a_quota_counts_what_is_delivered_until_it_is_trained(run: Run) -> None:
    await run.create(batch_groups=2, max_queued_groups=9, quota_groups=4, overflow_action=BLOCK)
    await run.fill("a", "b")
    await run.batch(0)
    await run.fill("c", "d")
    waiter = await Waiter.push(run, run.store, run.group("e"))
    assert await waiter.retry() == "blocked"
    await run.commit(0)
    assert await waiter.retry() == "queued"
    await run.check()


@pytest.mark.parametrize(
    "quota", [{"quota_tokens": 200, "max_queued_tokens": 100}, {"quota_bytes": 2 << 20, "max_queued_bytes": 1 << 20}]
)
async def test_quotas_bound_tokens_and_bytes(run: Run, quota: dict[str, int]) -> None:
    await run.create(batch_groups=2, max_queued_groups=9, overflow_action=REJECT, **quota)
    size = 1 << 19
    for step, names in enumerate(("ab", "cd")):
        assert await run.push_kinds(*(run.group(name, tokens=50, size=size) for name in names)) == ["queued"] * 2
        await run.batch(step)
    assert await run.push_kinds(run.group("e", tokens=1, size=1)) == ["rejected_full"]
    await run.commit(0)
    assert await run.push_kinds(run.group("e", tokens=1, size=1)) == ["queued"]


async def test_dropping_the_oldest_makes_room_under_a_quota_while_there_is_something_to_drop(run: Run) -> None:
    await run.create(batch_groups=2, max_queued_groups=9, quota_groups=4, overflow_action=DROP)
    await run.fill("a", "b")
    await run.batch(0)
    await run.fill("c", "d", "e")
    assert await run.queue() == ["d/0", "e/0"]
    await run.batch(1)
    assert await run.push_kinds(run.group("f")) == ["rejected_full"]
    assert await run.ledger() == {"accepted": 5, "delivered": 4, "dropped_overflow": 1}
    await run.check()
