"""A round of more groups than one call takes is gathered in portions: nobody can tell from what it gets, and a try that
ends in the middle costs nothing.
"""

import itertools
from typing import Any

import pytest

from buffer_service.domain import ops
from buffer_service.domain.policy import EnvironmentRule, Order, OverflowAction
from buffer_service.store.keys import index_key
from buffer_service.store.replies import pack, text, unpack
from tests.store.driver import RUN, Run

UNSET = -1
SHARES = tuple(EnvironmentRule(environment=f"env-{i}", share=share) for i, share in enumerate((3, 1, 0)))


async def portion(
    run: Run, groups: int, *, step: int = 0, rank: int = 0, world_size: int = 1, again: bool = False, round_: int = 0
) -> str:
    """One call of a pull's script, of a process that dies after it."""
    request = (0, run.epoch, step, rank, world_size, UNSET, round_, UNSET, groups, int(again))
    tag, _ = await run.store._call("pull", run.run_id, pack(*request))
    return tag


async def gather(run: Run, portions: int, groups: int = 2, **kwargs: Any) -> None:
    for index in range(portions):
        assert await portion(run, groups, again=index > 0, **kwargs) == "more"


async def fill(run: Run, count: int, first: int = 0, **kwargs: Any) -> None:
    """Groups g<i> of i % 7 + 1 tokens, in turn of three environments."""
    for i in range(first, first + count):
        await run.fill(f"g{i}", environment=f"env-{i % 3}", tokens=i % 7 + 1, **kwargs)


def ids(batch: ops.Batch) -> list[str]:
    return [group.group_id.removesuffix("/0") for group in batch.shard]


async def two_steps(run: Run, size: int, policy: dict[str, Any]) -> dict[str, Any]:
    """All that two ranks get in two steps, in portions of this size, and how the run stands afterwards."""
    other = Run(run.store, f"{RUN}.{size}")
    run.store.portion = size
    await other.create(**({"batch_groups": 16, "max_queued_groups": 100} | policy))
    for i in range(20):
        sizes: dict[str, Any] = {"tokens": i % 7 + 1, "lengths": (i, 3)}
        await other.fill(f"g{i}", environment=f"env-{i % 3}", head=i % 2, tail=i * 5 % 4 + 1, **sizes)
    pulled: list[ops.Batch] = []
    for step in range(2):
        for round_ in itertools.count():
            pulled += [await other.batch(step, round_, rank=rank, world_size=2) for rank in range(2)]
            if pulled[-1].final:
                break
        await fill(other, 16, first=100 * (step + 1))
    view = await other.view()
    return {
        "shards": [[(g.group_id, g.sequence, g.head_version, g.tail_version) for g in b.shard] for b in pulled],
        "sums": [(b.total_tokens, b.staleness_sum, b.staleness_max, b.shard_tokens, b.queued) for b in pulled],
        "view": (view.groups, view.statistics, view.staleness_counts, view.revision),
        "chunks": {
            field: [record[:3] + record[4:] for record in unpack(raw)]
            for field, raw in (await other.hash("chunks")).items()
        },
        "rounds": {field: unpack(raw) for field, raw in (await other.hash("rounds")).items()},
        "totals": (await other.record("run", "queue_stride"), await other.record("run", "totals")),
        "queue": await other.queue(),
    }


async def test_every_portion_leaves_a_run_in_order(run: Run) -> None:
    await run.create(batch_groups=8, max_queued_groups=10)
    await fill(run, 10)
    before = await run.view()
    for gathered in (3, 6):
        assert await portion(run, 3, again=gathered > 3) == "more"
        view = await run.view()
        assert await run.ledger() == {"accepted": 10, "queued": 10}
        assert len(await run.queue()) == 10 - gathered
        assert (view.next_step, view.revision) == (0, before.revision + 1)
        await run.check()
    assert await portion(run, 3, again=True) == "batch"
    assert await run.ledger() == {"accepted": 10, "queued": 2, "delivered": 8}
    assert (await run.view()).revision == before.revision + 1
    assert await run.hash("gathered") == {}
    batch = await run.batch(0)
    assert ids(batch) == [f"g{i}" for i in range(8)]
    assert await run.bodies(batch) == [f"body-g{i}".encode() for i in range(8)]
    await run.check()


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param({}, id="whole"),
        pytest.param({"environments": SHARES}, id="shares"),
        pytest.param({"batch_tokens": 40}, id="token budget"),
        pytest.param({"batch_tokens": 40, "equal_shards": True}, id="token budget, equal shards"),
        pytest.param({"batch_tokens": 1, "equal_shards": True}, id="a group for each rank is over budget"),
        pytest.param({"equal_shards": True, "environments": SHARES}, id="equal shards"),
        pytest.param({"micro_batch_groups": 4}, id="rounds"),
        pytest.param({"micro_batch_groups": 4, "batch_tokens": 40}, id="rounds with a token budget"),
    ],
)
async def test_the_size_of_portions_makes_no_difference(run: Run, order: Order, policy: dict[str, Any]) -> None:
    seen = [await two_steps(run, size, {"order": order} | policy) for size in (64, 1, 2, 5)]
    assert seen[0]["shards"][0]
    for size, others in zip((1, 2, 5), seen[1:], strict=True):
        assert others == seen[0], f"portions of {size}"


async def test_whoever_pulls_next_goes_on(run: Run) -> None:
    await run.create(batch_groups=7, max_queued_groups=20)
    await fill(run, 7)
    await gather(run, 2, world_size=2)
    assert await portion(run, 2, rank=1, world_size=2) == "more"
    assert len(await run.queue()) == 1
    shards = await run.shards(0, world_size=2)
    assert sorted(group_id for shard in shards for group_id in shard) == [f"g{i}/0" for i in range(7)]
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
    first = [await run.batch(0, round_) for round_ in range(3 if micro else 1)]
    if micro:
        await run.batch(1)
    await gather(run, 1, 1, step=1, round_=1 if micro else 0)
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
        assert [ids(await run.batch(0, round_)) for round_ in range(len(first))] == [ids(batch) for batch in first]
    elif mode is ops.ResumeMode.DISCARD:
        assert ids(await run.batch(0, world_size=1)) == [f"g{i}" for i in range(kept, kept + (2 if micro else 6))]


async def test_a_pull_that_has_to_wait_after_all_holds_nothing(run: Run) -> None:
    view = await run.create(batch_groups=6, max_queued_groups=20, max_staleness=5)
    await run.publish(4)
    await fill(run, 4)
    await fill(run, 3, first=4, head=4)
    await gather(run, 1)
    await run.store.update_policy(run.run_id, type(view.policy)(batch_groups=6, max_queued_groups=20, max_staleness=2))
    short = await run.short(0)
    assert (short.queued, short.needed) == (3, 6)
    assert await run.ledger() == {"accepted": 7, "dropped_stale": 4, "queued": 3}
    await run.check()


async def test_a_world_of_another_size_begins_anew(run: Run) -> None:
    await run.create(batch_groups=6, max_queued_groups=20, equal_shards=True)
    await fill(run, 8)
    await gather(run, 1, world_size=2)
    shards = await run.shards(0, world_size=3)
    assert [len(shard) for shard in shards] == [2, 2, 2]
    assert await run.queue() == ["g6/0", "g7/0"]
    await run.check()


async def test_admission_counts_what_is_gathered(run: Run) -> None:
    await run.create(batch_groups=4, max_queued_groups=20, max_lookahead=1)
    await run.submit(*(f"task-{i}" for i in range(20)))
    await fill(run, 5)
    await gather(run, 2, 1)
    assert len((await run.lease(20)).grants) == 3


async def test_gathered_groups_take_up_the_queues_room(run: Run) -> None:
    await run.create(batch_groups=6, max_queued_groups=6, overflow_action=OverflowAction.REJECT)
    await fill(run, 6)
    await gather(run, 2)
    assert await run.push_kinds(run.group("late")) == ["rejected_full"]
    assert ids(await run.batch(0)) == [f"g{i}" for i in range(6)]
    assert await run.push_kinds(run.group("late")) == ["queued"]


async def test_gathered_groups_are_dropped_where_no_others_are_left_to_drop(run: Run) -> None:
    drop = OverflowAction.DROP_OLDEST
    await run.create(batch_groups=6, max_queued_groups=8, max_queued_bytes=1 << 20, overflow_action=drop)
    await run.push(*(run.group(f"g{i}", size=100_000) for i in range(8)))
    await gather(run, 2)
    assert await run.push_kinds(run.group("large", size=1_000_000)) == ["queued"]
    assert await run.ledger() == {"accepted": 9, "queued": 1, "dropped_overflow": 8}
    assert await run.queue() == ["large/0"]
    await run.check()


async def test_gathered_groups_are_deleted_with_their_run(run: Run) -> None:
    await run.create(batch_groups=6, max_queued_groups=20)
    await fill(run, 8)
    await gather(run, 2)
    await run.store.delete_run(run.run_id)
    left = [text(key) for key in await run.command("KEYS", "*") if text(key) not in {"rb:runs", "rb:schema"}]
    assert [key for key in left if key != index_key(run.run_id, "test_now")] == []


async def test_a_recording_has_the_groups_in_order_of_pick(run: Run) -> None:
    await run.create(batch_groups=5, max_queued_groups=20, order=Order.LIFO, record_groups=True)
    await fill(run, 5)
    run.store.portion = 2
    await run.batch(0)
    events = await run.command("XRANGE", index_key(run.run_id, "record"), "-", "+")
    rounds = [unpack(fields[3]) for _, fields in events if fields[1] == b"round"]
    assert [[text(group_id) for group_id in one[4]] for one in rounds] == [[f"g{i}/0" for i in (4, 3, 2, 1, 0)]]
