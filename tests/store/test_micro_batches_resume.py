"""Streaming: what a resume makes of a step that is still open."""

import itertools

from buffer_service import commands
from tests.store.driver import Run
from tests.store.test_micro_batches import DISCARD, REQUEUE, STREAMED, fill, ids


async def test_a_replayed_open_step_goes_on_where_it_stood(run: Run) -> None:
    await run.create(**STREAMED)
    await fill(run, 6)
    first = await run.batch(0)
    resumed = await run.resume()
    assert (resumed.next_step, resumed.next_unassembled_step) == (0, 0)
    assert await run.ledger() == {"accepted": 6, "queued": 5, "forming": 1}
    assert (await run.batch(0)).shard == first.shard
    assert ids(await run.batch(0, 1)) == ["t1/0"]
    await run.check()


async def test_a_kept_open_step_asks_for_no_version_that_the_new_timeline_has_not_reached(run: Run) -> None:
    await run.create(batch_groups=2, micro_batch_groups=1, max_queued_groups=9, max_staleness=0, batches_per_publish=2)
    for step, micro_batch in itertools.product(range(2), range(2)):
        await run.fill(f"t{step}{micro_batch}")
        await run.batch(step, micro_batch)
    await run.publish(1, commit_through=1)
    await run.fill("open", head=1)
    assert (await run.batch(2)).train_version == 1
    assert (await run.resume(1)).version == 0
    assert (await run.batch(2)).train_version == 0
    await run.fill("fresh", head=0)
    assert (await run.batch(2, 1)).final


async def test_another_world_size_takes_an_open_step_over(run: Run) -> None:
    await run.create(batch_groups=8, micro_batch_groups=2, max_queued_groups=8)
    await fill(run, 8)
    first = await run.shards(0, world_size=2)
    assert first == [["t0/0", "t2/0"], ["t1/0", "t3/0"]]
    await run.resume()
    assert await run.shards(0, world_size=1) == [["t0/0", "t1/0", "t2/0", "t3/0"]]
    assert await run.shards(0, 1, world_size=1) == [["t4/0", "t5/0"]]
    last = await run.batch(0, 2)
    assert (last.final, last.total_groups) == (True, 8)
    assert (await run.view()).world_size == 1
    await run.commit(0)
    await run.checkpoint(0)
    await run.check()
    assert await run.payload_keys() == set()


async def test_equal_shards_stay_as_equal_as_another_world_size_allows(run: Run) -> None:
    await run.create(batch_groups=6, equal_shards=True)
    for name, tokens in zip("abcdef", (90, 80, 70, 1, 1, 1), strict=True):
        await run.fill(name, tokens=tokens)
    assert await run.shards(0, world_size=2) == [["a/0", "d/0", "e/0"], ["b/0", "c/0", "f/0"]]
    await run.resume(0)
    assert await run.shards(0, world_size=4) == [["a/0"], ["b/0"], ["c/0", "f/0"], ["d/0", "e/0"]]


async def test_an_open_step_is_requeued(run: Run) -> None:
    await run.create(**STREAMED)
    await fill(run, 6)
    for micro_batch in range(2):
        await run.batch(0, micro_batch)
    resumed = await run.resume(0, REQUEUE)
    assert (resumed.next_step, resumed.next_unassembled_step) == (0, 0)
    assert await run.ledger() == {"accepted": 6, "queued": 6}
    assert await run.queue() == [f"t{i}/0" for i in range(6)]
    assert await run.shards(0, world_size=3) == [["t0/0"], ["t1/0"], ["t2/0"]]
    await run.check()


async def test_an_open_step_is_discarded(run: Run) -> None:
    await run.create(**STREAMED, max_lookahead=0)
    await fill(run, 6)
    await run.batch(0)
    await run.batch(0, 1)
    resumed = await run.resume(mode=DISCARD)
    assert (resumed.next_step, resumed.next_unassembled_step) == (0, 0)
    assert await run.ledger() == {"accepted": 6, "queued": 4, "discarded": 2}
    await run.submit("new")
    # 4 are queued, none is in a step: of the 6 that the lookahead allows 2 are free.
    assert len((await run.lease(2)).grants) == 1
    assert ids(await run.batch(0)) == ["t2/0"]
    await run.check()


async def test_complete_and_open_steps_are_requeued_together(run: Run) -> None:
    await run.create(batch_groups=2, micro_batch_groups=1, max_queued_groups=5)
    await fill(run, 5)
    for step, micro_batch in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0)):
        await run.batch(step, micro_batch)
    await run.commit(0)
    assert await run.ledger() == {"accepted": 5, "trained": 2, "delivered": 2, "forming": 1}
    resumed = await run.resume(0, REQUEUE)
    assert (resumed.next_step, resumed.next_unassembled_step) == (0, 0)
    assert await run.queue() == [f"t{i}/0" for i in range(5)]
    assert (await run.view()).committed_steps == 0
    await run.check()


async def test_heads_of_an_open_step_follow_the_fork(run: Run) -> None:
    await run.create(**STREAMED)
    await run.publish(3)
    await fill(run, 2, head=3)
    await run.batch(0)
    await run.publish(5)
    resumed = await run.resume()
    assert resumed.version == 5
    await run.store.call(commands.update_policy(run.run_id, (await run.view()).policy))
    replayed = await run.batch(0)
    assert [(group.head_version, group.tail_version) for group in replayed.shard] == [(3, 3)]
    assert (replayed.train_version, (await run.batch(0, 1)).train_version) == (3, 3)
