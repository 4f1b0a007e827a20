"""The order of submission: groups enter batches as they were begun, within a window of those in flight."""

from collections.abc import Sequence
from typing import Any

import pytest

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.policy import EnvironmentRule, Order, RunPolicy
from buffer_service.domain.ports import Topic
from buffer_service.observability.diagnosis import Situation, waits_on
from buffer_service.store.keys import SCHEMA_VERSION, index_key
from buffer_wire.errors import InvalidPolicy
from tests.store.driver import Run

WAIT_MS = 5_000
ORDERED: dict[str, Any] = {
    "batch_groups": 2,
    "max_lookahead": 2,
    "max_queued_groups": 6,
    "order": Order.SUBMISSION,
    "order_window_groups": 2,
    "stale_wait_ms": WAIT_MS,
    "lease_ttl_ms": 60_000,
}


async def begin(run: Run, *names: str, environment: str = "env") -> Sequence[ops.LeaseGrant]:
    """Leases of these tasks, begun in this order."""
    await run.submit(*names, environment=environment)
    return (await run.lease(len(names))).grants


async def finish(run: Run, *grants: ops.LeaseGrant) -> None:
    for grant in grants:
        await run.push(run.group(grant))


def names(batch: ops.Batch) -> list[str]:
    return [group.group_id.split("/")[0] for group in batch.shard]


async def test_groups_enter_batches_as_they_were_begun_whichever_ended_first(run: Run) -> None:
    await run.create(**ORDERED)
    a, b, c, d = await begin(run, "a", "b", "c", "d")
    await finish(run, d, c, b, a)
    assert [names(await run.batch(step)) for step in (0, 1)] == [["a", "b"], ["c", "d"]]
    await run.check()


@pytest.mark.parametrize(("window", "first"), [(1, "ab"), (2, "ab"), (3, "bc"), (9, "bc"), (0, "bc")])
async def test_a_batch_waits_where_it_would_take_a_group_that_began_the_window_or_more_later(
    run: Run, window: int, first: str
) -> None:
    await run.create(**ORDERED | {"order_window_groups": window})
    a, *others = await begin(run, "a", "b", "c", "d")
    await finish(run, *others)
    if "a" in first:
        short = await run.short(0)
        assert (short.queued, short.needed, short.awaited, short.awaited_task) == (3, 2, 1, "a")
        assert "1 group in flight" in short.blocked_hint
        view = await run.view()
        assert waits_on(Situation.of(view)) == f"generation: {short.blocked_hint}"
        assert short.blocked_hint.endswith("first of all task a")
        await finish(run, a)
        # It looks again when it hears of that, and every 2 s.
        await run.pass_ms(ops.AWAITED_MS + 1)
        assert waits_on(Situation.of(await run.view())).startswith("the trainer")
    assert names(await run.batch(0)) == list(first)
    await run.check()


async def test_it_waits_no_longer_than_the_policy_says_and_then_takes_what_is_there_in_order(run: Run) -> None:
    await run.create(**ORDERED)
    _, b, c, d = await begin(run, "a", "b", "c", "d")
    await finish(run, d, c, b)
    await run.short(0)
    await run.pass_ms(WAIT_MS - 1)
    await run.short(0)
    await run.pass_ms(1)
    assert names(await run.batch(0)) == ["b", "c"]


@pytest.mark.parametrize("kind", [ops.ReturnKind.INTERRUPTED, ops.ReturnKind.FAILED])
async def test_a_lease_that_comes_back_ends_the_wait_and_its_task_keeps_its_place(
    run: Run, kind: ops.ReturnKind
) -> None:
    await run.create(**ORDERED)
    a, b, c, d = await begin(run, "a", "b", "c", "d")
    await finish(run, b, c, d)
    await run.short(0)
    ticket = run.store.notifications.ticket(run.run_id, Topic.GROUPS)
    await run.give_back(a, kind=kind)
    assert await run.store.notifications.wait(run.run_id, Topic.GROUPS, ticket, 5.0) > ticket
    assert names(await run.batch(0)) == ["b", "c"]
    await run.pass_ms(1_000)
    (again,) = (await run.lease()).grants
    (e,) = await begin(run, "e")
    await finish(run, e)
    assert (await run.short(1)).awaited_task == "a"
    await finish(run, again)
    assert names(await run.batch(1)) == ["a", "d"]
    await run.check()


async def test_what_is_started_anew_has_a_new_place_and_a_push_without_a_lease_begins_as_it_comes(run: Run) -> None:
    await run.create(**ORDERED | {"max_staleness": 0, "stale_action": "recycle", "max_lookahead": 0})
    (a,) = await begin(run, "a")
    await finish(run, a)
    await run.publish(1)
    await run.fill("loose", head=1)
    await run.short(0)
    assert (await run.ledger())["recycled"] == 1
    (again,) = (await run.lease(loaded=ops.WeightVersion(1, 1))).grants
    await run.push(run.group(again, head=1))
    assert names(await run.batch(0)) == ["loose", "a"]


async def test_micro_batches_wait_each(run: Run) -> None:
    await run.create(**ORDERED | {"micro_batch_groups": 1, "order_window_groups": 1})
    a, b = await begin(run, "a", "b")
    await finish(run, b)
    assert (await run.short(0)).awaited_task == "a"
    await finish(run, a)
    assert names(await run.batch(0, 0)) == ["a"]
    assert names(await run.batch(0, 1)) == ["b"]


async def test_shares_divide_what_is_within_the_window_and_what_has_none_holds_up_nobody(run: Run) -> None:
    rules = tuple(EnvironmentRule(environment=name, share=share) for name, share in (("x", 3), ("y", 1), ("z", 0)))
    await run.create(**ORDERED | {"environments": rules, "order_window_groups": 3})
    (z,) = await begin(run, "z", environment="z")
    (y,) = await begin(run, "y", environment="y")
    x = await begin(run, "x0", "x1", "x2", environment="x")
    await finish(run, z, *x)
    # Of x only x0 began less than three groups after y.
    assert names(await run.batch(0)) == ["z", "x0"]
    assert (await run.short(1)).awaited_task == "y"
    await finish(run, y)
    assert sorted(names(await run.batch(1))) == ["x1", "y"]
    await run.check()


async def test_a_large_batch_is_gathered_within_the_window(run: Run) -> None:
    run.portion = 1
    await run.create(**ORDERED | {"batch_groups": 3, "max_queued_groups": 9, "order_window_groups": 3})
    a, *others = await begin(run, "a", "b", "c", "d")
    await finish(run, *others)
    assert (await run.short(0)).awaited_task == "a"
    await finish(run, a)
    assert names(await run.batch(0)) == ["a", "b", "c"]
    await run.check()


async def test_another_order_ends_the_wait_and_what_comes_then_comes_last(run: Run) -> None:
    await run.create(**ORDERED)
    a, b, c, d = await begin(run, "a", "b", "c", "d")
    await finish(run, c, d)
    await run.short(0)
    await run.store.call(commands.update_policy(run.run_id, RunPolicy(**ORDERED | {"order": Order.FIFO})))
    await finish(run, b, a)
    assert [names(await run.batch(step)) for step in (0, 1)] == [["c", "d"], ["b", "a"]]
    await run.store.call(commands.update_policy(run.run_id, RunPolicy(**ORDERED)))
    await run.publish(1, commit_through=1)
    e, f = await begin(run, "e", "f")
    await finish(run, f)
    assert isinstance(await run.pull(2), ops.Short)
    await finish(run, e)
    assert names(await run.batch(2)) == ["e", "f"]
    await run.check()


async def test_a_service_that_knows_no_turns_refuses_a_run_that_has_given_one(run: Run) -> None:
    """It would give a group the number of another one's turn, whose record it then overwrites."""
    await run.create(**ORDERED)
    await run.submit("a")
    record = index_key(run.run_id, "run")
    assert await run.command("HGET", record, "layout") == str(SCHEMA_VERSION).encode()
    await run.lease()
    assert await run.command("HGET", record, "layout") == f"{SCHEMA_VERSION}p".encode()
    await run.store.call(commands.update_policy(run.run_id, RunPolicy(**ORDERED | {"order": Order.FIFO})))
    assert await run.command("HGET", record, "layout") == f"{SCHEMA_VERSION}p".encode()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_lookahead": -1}, "order_window_groups"),
        ({"max_queued_groups": 5}, "max_queued_groups"),
        ({"batch_tokens": 100}, "order_window_groups"),
        ({"quota_groups": 7}, "quota_groups"),
    ],
)
def test_a_window_without_room_for_what_is_waited_for_is_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidPolicy) as refused:
        RunPolicy(**ORDERED | change)
    assert refused.value.attributes["field"] == field
    RunPolicy(**ORDERED | change | {"order_window_groups": 0})


def test_queue_space_that_is_reserved_is_room_enough() -> None:
    RunPolicy(**ORDERED | {"max_lookahead": -1, "reserve_queue_space": True, "max_queued_groups": 2})
