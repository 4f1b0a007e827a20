"""Tests of what others do between the calls of a pull that gathers a large micro-batch."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.policy import EnvironmentRule, Order, OverflowAction
from buffer_wire.errors import WorldSizeMismatch
from tests.store.driver import RUN, Run
from tests.store.gathering import SHARES, fill, gather, ids

DROP = OverflowAction.DROP_OLDEST
Act = Callable[[Run], Awaitable[object]]


def policy(*changes: dict[str, Any]) -> Act:
    """Fields of the policy are changed, one change after another."""

    async def act(run: Run) -> None:
        for fields in changes:
            present = (await run.view()).policy
            await run.store.call(commands.update_policy(run.run_id, replace(present, **fields)))

    return act


OTHER_SHARES = (EnvironmentRule(environment="env-2", share=5), EnvironmentRule(environment="env-0", share=1))


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize(
    "act",
    [
        pytest.param(policy({"max_staleness": 2}), id="a tighter gate"),
        pytest.param(policy({"max_staleness": 2}, {"max_staleness": 9}), id="a tighter gate for a moment"),
        pytest.param(policy({"order": Order.LIFO}), id="lifo"),
        pytest.param(policy({"order": Order.STALEST_FIRST}), id="stalest first"),
        pytest.param(policy({"environments": OTHER_SHARES}), id="other shares"),
        pytest.param(policy({"environments": ()}), id="no shares"),
        pytest.param(policy({"environments": ()}, {"environments": OTHER_SHARES}), id="no shares, then others"),
        pytest.param(policy({"batch_groups": 7}), id="a larger batch"),
        pytest.param(policy({"batch_tokens": 9}), id="a token budget"),
        pytest.param(lambda run: run.publish(5), id="a publish"),
        pytest.param(lambda run: run.resume(), id="a resume"),
    ],
)
async def test_what_changes_the_pick_begins_it_anew(run: Run, act: Act, order: Order) -> None:
    """Pull as if nothing had been gathered."""
    twin = Run(run.store, f"{RUN}.twin")
    seen = []
    for one in (run, twin):
        await one.create(
            batch_groups=6, max_queued_groups=40, max_staleness=6, environments=SHARES, order=order, prefetch_batches=1
        )
        for i in range(27):
            await one.fill(f"g{i}", environment=f"env-{i % 3}", head=i * 7 % 5, tail=5, tokens=i % 7 + 1)
        await one.batch(0)
        await one.publish(4)
        if one is run:
            await gather(one, 2, step=1)
        await act(one)
        batch = await one.batch(1)
        seen.append((ids(batch), await one.ledger(), await one.record("run", "queue_stride"), await one.queue()))
    assert seen[0] == seen[1]
    await twin.store.delete_run(twin.run_id)
    await run.check()


async def test_a_try_for_other_weights_begins_anew(run: Run) -> None:
    await run.create(batch_groups=6, max_queued_groups=20, max_staleness=2, environments=SHARES)
    await fill(run, 4)
    await fill(run, 6, first=4, head=3)
    await gather(run, 2)
    await run.publish(3)
    batch = await run.batch(0)
    assert (batch.train_version, ids(batch)) == (3, [f"g{i}" for i in range(4, 10)])
    assert await run.ledger() == {"accepted": 10, "dropped_stale": 4, "delivered": 6}
    await run.check()


async def test_what_is_put_back_is_picked_as_if_it_had_never_been_taken(run: Run) -> None:
    policy = {"batch_groups": 9, "max_queued_groups": 50, "environments": SHARES}
    other = Run(run.store, f"{RUN}.other")
    for one in (run, other):
        await one.create(**policy)
        await fill(one, 27)
        assert len((await one.batch(0)).shard) == 9
    await gather(run, 3, step=1)
    assert await run.record("run", "queue_stride") != await other.record("run", "queue_stride")
    for one in (run, other):
        await one.publish(1)
    assert ids(await run.batch(1)) == ids(await other.batch(1))
    assert await run.record("run", "queue_stride") == await other.record("run", "queue_stride")


@pytest.mark.parametrize("mode", ops.ResumeMode)
@pytest.mark.parametrize("micro", [0, 2])
async def test_a_resume_finds_gathered_groups_in_the_queue(run: Run, mode: ops.ResumeMode, micro: int) -> None:
    await run.create(batch_groups=6, max_queued_groups=40, micro_batch_groups=micro)
    await fill(run, 20)
    first = [await run.batch(0, micro_batch) for micro_batch in range(3 if micro else 1)]
    if micro:
        await run.batch(1)
    await gather(run, 1, 1, step=1, micro_batch=1 if micro else 0)
    assert (await run.ledger())["queued"] == (12 if micro else 14)
    await run.resume(0, mode)
    kept = 8 if micro else 6
    expected: dict[str, int] = {
        ops.ResumeMode.REPLAY: {"delivered": 6, "forming": 2 if micro else 0, "queued": 20 - kept},
        ops.ResumeMode.REQUEUE: {"queued": 20},
        ops.ResumeMode.DISCARD: {"discarded": kept, "queued": 20 - kept},
    }[mode]
    assert await run.ledger() == {"accepted": 20} | {state: count for state, count in expected.items() if count}
    assert len(await run.queue()) == expected.get("queued", 0)
    await run.check()
    if mode is ops.ResumeMode.REPLAY:
        assert [ids(await run.batch(0, micro_batch)) for micro_batch in range(len(first))] == [
            ids(batch) for batch in first
        ]
    elif mode is ops.ResumeMode.DISCARD:
        assert ids(await run.batch(0, world_size=1)) == [f"g{i}" for i in range(kept, kept + (2 if micro else 6))]


async def test_a_pull_that_has_to_wait_after_all_holds_nothing(run: Run) -> None:
    view = await run.create(batch_groups=6, max_queued_groups=20, max_staleness=5)
    await run.publish(4)
    await fill(run, 4)
    await fill(run, 3, first=4, head=4)
    await gather(run, 1)
    await run.store.call(
        commands.update_policy(run.run_id, type(view.policy)(batch_groups=6, max_queued_groups=20, max_staleness=2))
    )
    short = await run.short(0)
    assert (short.queued, short.needed) == (3, 6)
    assert await run.ledger() == {"accepted": 7, "dropped_stale": 4, "queued": 3}
    await run.check()


async def test_a_pull_that_finds_groups_dropped_holds_nothing(run: Run) -> None:
    await run.create(batch_groups=6, max_queued_groups=8, max_queued_bytes=1 << 20, overflow_action=DROP)
    await run.push(*(run.group(f"g{i}", size=100_000) for i in range(8)))
    await gather(run, 2, 1)
    assert await run.push_kinds(run.group("large", size=700_000)) == ["queued"]
    assert await run.queue() == ["g7/0", "large/0"]
    short = await run.short(0)
    assert (short.queued, short.needed) == (4, 6)
    assert await run.queue() == ["g0/0", "g1/0", "g7/0", "large/0"]
    await run.check()


async def test_the_turns_are_those_of_what_is_taken_where_only_some_was_dropped(run: Run) -> None:
    shares = tuple(EnvironmentRule(environment=name, share=1) for name in "ab")
    twin = Run(run.store, f"{RUN}.twin")
    for one in (run, twin):
        await one.create(
            batch_groups=6, max_queued_groups=9, max_queued_bytes=1 << 20, overflow_action=DROP, environments=shares
        )
        if one is run:
            for i in range(8):
                await one.fill(f"g{i}", environment="ab"[i % 2], size=100_000)
            await gather(one, 3, 1)
            # Everything but g0 is dropped, of what is gathered the last portions.
            assert await one.push_kinds(one.group("large", environment="b", size=900_000)) == ["queued"]
            assert await one.ledger() == {"accepted": 9, "queued": 2, "dropped_overflow": 7}
        else:
            await one.fill("g0", environment="a", size=100_000)
            await one.fill("large", environment="b", size=900_000)
        await one.fill(*(f"s{i}" for i in range(3)), environment="b")
        await one.fill(*(f"t{i}" for i in range(3)), environment="a")
    assert ids(await run.batch(0)) == ids(await twin.batch(0))
    assert await run.record("run", "queue_stride") == await twin.record("run", "queue_stride")


async def test_a_micro_batch_of_a_step_that_began_before_a_publish_is_gathered_to_its_end(run: Run) -> None:
    await run.create(batch_groups=12, micro_batch_groups=6, max_queued_groups=40)
    await fill(run, 20)
    await run.batch(0)
    await gather(run, 1, step=0, micro_batch=1)
    await run.publish(1)
    run.portion = 2
    async with asyncio.timeout(20):
        batch = await run.batch(0, 1)
    assert (batch.train_version, ids(batch)) == (0, [f"g{i}" for i in range(6, 12)])


async def test_a_world_of_another_size_is_refused_until_a_resume(run: Run) -> None:
    await run.create(batch_groups=6, max_queued_groups=20, equal_shards=True)
    await fill(run, 8)
    await gather(run, 1, world_size=2)
    with pytest.raises(WorldSizeMismatch):
        await run.pull(0, world_size=3)
    await run.resume()
    shards = await run.shards(0, world_size=3)
    assert [len(shard) for shard in shards] == [2, 2, 2]
    assert await run.queue() == ["g6/0", "g7/0"]
    await run.check()


async def test_gathered_groups_are_dropped_where_no_others_are_left_to_drop(run: Run) -> None:
    await run.create(batch_groups=6, max_queued_groups=8, max_queued_bytes=1 << 20, overflow_action=DROP)
    await run.push(*(run.group(f"g{i}", size=100_000) for i in range(8)))
    await gather(run, 2)
    assert await run.push_kinds(run.group("large", size=1_000_000)) == ["queued"]
    assert await run.ledger() == {"accepted": 9, "queued": 1, "dropped_overflow": 8}
    assert await run.queue() == ["large/0"]
    await run.check()


# ── several callers ──


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param({"train_version": 0}, {"train_version": 1}, id="train_version"),
        pytest.param({"train_version": 1}, {"train_version": 0}, id="an older train_version"),
        pytest.param({"batch_groups": 12}, {"batch_groups": 9}, id="batch_groups"),
        pytest.param({"batch_groups": 9}, {}, id="the policy's batch_groups"),
    ],
)
async def test_whoever_begins_decides_for_all_ranks(run: Run, first: dict[str, int], second: dict[str, int]) -> None:
    await run.create(batch_groups=12, max_queued_groups=40)
    await fill(run, 30)
    await gather(run, 1, world_size=2, **first)
    run.portion = 2
    theirs = await run.batch(0, rank=1, world_size=2, **second)
    mine = await run.batch(0, rank=0, world_size=2, **first)
    assert mine.total_groups == first.get("batch_groups", 12)
    assert mine.train_version == first.get("train_version", 0)
    assert (theirs.total_groups, theirs.train_version) == (mine.total_groups, mine.train_version)
    assert sorted([*ids(mine), *ids(theirs)]) == sorted(f"g{i}" for i in range(mine.total_groups))


@pytest.mark.parametrize(
    "asks",
    [
        pytest.param([{"train_version": 0}, {"train_version": 1}], id="train_version"),
        pytest.param([{"batch_groups": 128}, {"batch_groups": 100}, {"batch_groups": 120}], id="batch_groups"),
        pytest.param([{"world_size": 1}, {"world_size": 2}, {"world_size": 3}], id="world_size"),
    ],
)
async def test_callers_that_want_different_things_come_to_an_end(run: Run, asks: list[dict[str, int]]) -> None:
    await run.create(batch_groups=128, max_queued_groups=400)
    await run.push(*(run.group(f"g{i}") for i in range(200)))
    run.portion = 4
    async with asyncio.timeout(20):
        tries = [run.pull(0, **ask) for ask in asks * 2]
        answers = await asyncio.gather(*tries, return_exceptions=True)
    batches = [answer for answer in answers if isinstance(answer, ops.Batch)]
    assert len({(batch.train_version, batch.total_groups) for batch in batches}) == 1
    refused = [answer for answer in answers if not isinstance(answer, ops.Batch)]
    assert all(isinstance(answer, WorldSizeMismatch) for answer in refused)
    assert len(refused) == (4 if "world_size" in asks[0] else 0)
    await run.check()


async def place(run: Run, task_id: str) -> str:
    _, _, task = await run.store.call(commands.task(run.run_id, task_id))
    return str(task.place.value)


async def test_an_inspected_task_is_not_said_to_be_in_a_step_while_it_is_gathered(run: Run) -> None:
    await run.create(batch_groups=6, max_queued_groups=20)
    await fill(run, 8)
    await gather(run, 1)
    assert [await place(run, name) for name in ("g0", "g7")] == ["", "queued"]
    await run.batch(0)
    assert [await place(run, name) for name in ("g0", "g7")] == ["in_step", "queued"]
