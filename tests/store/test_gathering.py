"""A micro-batch of more groups than one call takes is gathered in portions: nobody can tell from what it gets, and a
try that ends in the middle costs nothing.
"""

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from buffer_service.commands.replies import text, unpack
from buffer_service.domain.policy import Order, OverflowAction
from buffer_service.domain.ports import Topic
from buffer_service.store.keys import index_key
from tests.store.driver import RUN, Run
from tests.store.gathering import SHARES, fill, gather, ids, portion

if TYPE_CHECKING:
    from buffer_service.domain import ops


async def two_steps(run: Run, size: int, policy: dict[str, Any]) -> dict[str, Any]:
    """All that two ranks get in two steps, in portions of this size, and how the run stands afterwards."""
    other = Run(run.store, f"{RUN}.{size}")
    other.portion = size
    await other.create(**({"batch_groups": 16, "max_queued_groups": 100} | policy))
    for i in range(20):
        sizes: dict[str, Any] = {"tokens": i % 7 + 1, "lengths": (i, 3)}
        await other.fill(f"g{i}", environment=f"env-{i % 3}", head=i % 2, tail=i * 5 % 4 + 1, **sizes)
    pulled: list[ops.Batch] = []
    for step in range(2):
        for micro_batch in itertools.count():
            pulled += [await other.batch(step, micro_batch, rank=rank, world_size=2) for rank in range(2)]
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
        "micro_batches": {field: unpack(raw) for field, raw in (await other.hash("micro_batches")).items()},
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
        # Nobody is told that it happened: a store that loses the last call must be behind what was acknowledged.
        assert (view.next_step, view.revision) == (0, before.revision)
        await run.check()
    assert await portion(run, 3, again=True) == "batch"
    assert await run.ledger() == {"accepted": 10, "queued": 2, "delivered": 8}
    assert (await run.view()).revision == before.revision + 1
    assert await run.hash("gathered") == {}
    batch = await run.batch(0)
    assert ids(batch) == [f"g{i}" for i in range(8)]
    assert await run.bodies(batch) == [f"body-g{i}".encode() for i in range(8)]
    await run.check()


async def test_what_is_evicted_in_portions_raises_the_revision_with_the_answer(run: Run) -> None:
    await run.create(batch_groups=2, max_queued_groups=10, max_staleness=1)
    await fill(run, 3)
    published = (await run.publish(5)).revision
    for evicted in (1, 2, 3):
        assert await portion(run, 1, again=evicted > 1) == "more"
        assert ((await run.view()).revision, await run.ledger()) == (
            published,
            {"accepted": 3, "dropped_stale": evicted} | ({"queued": 3 - evicted} if evicted < 3 else {}),
        )
    assert await portion(run, 1, again=True) == "short"
    assert (await run.view()).revision == published + 1


async def test_room_that_an_eviction_makes_is_told_though_the_micro_batch_is_only_gathered(run: Run) -> None:
    await run.create(batch_groups=4, max_queued_groups=8, max_staleness=1)
    await fill(run, 1)
    await fill(run, 6, first=1, head=5)
    await run.publish(5)
    hints = run.store.notifications
    await hints.wait(run.run_id, Topic.WEIGHTS, 0, 10)
    before = hints.ticket(run.run_id, Topic.SPACE)
    assert await portion(run, 2) == "more"
    assert await run.ledger() == {"accepted": 7, "dropped_stale": 1, "queued": 6}
    assert await hints.wait(run.run_id, Topic.SPACE, before, 10) > before
    before, tasks = hints.ticket(run.run_id, Topic.SPACE), hints.ticket(run.run_id, Topic.TASKS)
    assert await portion(run, 1, again=True) == "more"
    await run.submit("t")
    await hints.wait(run.run_id, Topic.TASKS, tasks, 10)
    assert hints.ticket(run.run_id, Topic.SPACE) == before, "what is gathered takes its room until the batch is closed"
    assert await portion(run, 1, again=True) == "batch"
    assert await hints.wait(run.run_id, Topic.SPACE, before, 10) > before


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
        pytest.param({"micro_batch_groups": 4}, id="micro_batches"),
        pytest.param({"micro_batch_groups": 4, "batch_tokens": 40}, id="micro-batches with a token budget"),
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


async def test_gathered_groups_are_deleted_with_their_run(run: Run) -> None:
    await run.create(batch_groups=6, max_queued_groups=20)
    await fill(run, 8)
    await gather(run, 2)
    await run.store.delete_run(run.run_id)
    left = [text(key) for key in await run.command("KEYS", "*") if text(key) not in run.names]
    assert [key for key in left if key != index_key(run.run_id, "test_now")] == []


async def test_a_recording_has_the_groups_in_order_of_pick(run: Run) -> None:
    await run.create(batch_groups=5, max_queued_groups=20, order=Order.LIFO, record_groups=True)
    await fill(run, 5)
    run.portion = 2
    await run.batch(0)
    events = await run.command("XRANGE", index_key(run.run_id, "record"), "-", "+")
    micro_batches = [unpack(fields[3]) for _, fields in events if fields[1] == b"micro_batch"]
    assert [[text(group_id) for group_id in one[4]] for one in micro_batches] == [[f"g{i}/0" for i in (4, 3, 2, 1, 0)]]
