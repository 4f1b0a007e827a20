"""Pulling batches: assembly, the staleness gate, sharding, replay."""

import random

import pytest

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.policy import StaleAction
from buffer_wire.errors import InvalidField, ReplayGap, StaleTerm, StepAhead, WorldSizeMismatch
from tests.oracle.rules.sharding import shard
from tests.store.driver import Run, weights


async def test_a_batch_takes_the_oldest_groups_in_order(run: Run) -> None:
    await run.create(max_queued_groups=5)
    await run.fill("a", "b", "c")
    batch = await run.batch(0)
    assert [g.group_id for g in batch.shard] == ["a/0", "b/0"]
    assert await run.bodies(batch) == [b"body-a", b"body-b"]
    assert (batch.total_groups, batch.total_samples, batch.total_tokens, batch.total_loss_tokens) == (2, 8, 20, 10)
    assert (batch.shard_tokens, batch.replayed, batch.queued, batch.train_version) == (20, False, 1, 0)
    assert await run.ledger() == {"accepted": 3, "queued": 1, "delivered": 2}
    await run.check()


async def test_too_few_groups_say_what_is_short(run: Run) -> None:
    await run.create(batch_groups=3)
    assert isinstance(empty := await run.pull(0), ops.Short)
    assert "feeder" in empty.blocked_hint
    await run.submit("a", "b")
    assert isinstance(unasked := await run.pull(0), ops.Short)
    assert "no worker has asked" in unasked.blocked_hint
    lease = await run.one_lease()
    await run.push(run.group(lease))
    await run.lease()
    short = await run.pull(0)
    assert isinstance(short, ops.Short)
    assert (short.queued, short.needed, short.leased, short.pending, short.blocked_hint) == (1, 3, 1, 0, "")
    assert (await run.view()).world_size == 0


async def test_a_step_is_replayed_exactly_whoever_asks(run: Run) -> None:
    await run.create(max_queued_groups=9)
    await run.fill("a", "b", "c", "d", tokens=7)
    first = await run.batch(0)
    again = await run.batch(0)
    assert again.replayed
    assert (again.shard, again.revision) == (first.shard, first.revision)
    assert [g.group_id for g in (await run.batch(1)).shard] == ["c/0", "d/0"]
    assert (await run.batch(0)).shard == first.shard
    await run.commit(0)
    assert (await run.batch(0)).shard == first.shard
    await run.checkpoint(0)
    with pytest.raises(ReplayGap):
        await run.pull(0)


async def test_pull_refuses_what_is_out_of_turn(run: Run) -> None:
    await run.create()
    with pytest.raises(InvalidField, match="rank"):
        await run.pull(0, rank=2, world_size=2)
    with pytest.raises(StepAhead):
        await run.pull(1)
    await run.fill("a", "b")
    await run.publish(3)
    with pytest.raises(InvalidField, match="at least the published version 3"):
        await run.pull(0, train_version=2)
    await run.batch(0, world_size=2)
    with pytest.raises(WorldSizeMismatch):
        await run.pull(0, world_size=3)
    run.term = 2
    with pytest.raises(StaleTerm):
        await run.pull(0)


async def test_statistics_follow_the_versions(run: Run) -> None:
    await run.create()
    await run.publish(4)
    await run.fill("a", head=1, tail=3)
    await run.fill("b", head=5, tail=6)
    batch = await run.batch(0, train_version=4)
    assert (batch.staleness_sum, batch.staleness_max) == (3, 3)
    statistics = (await run.view()).statistics
    assert statistics["staleness_sum"] == 3
    assert statistics["pre_queue_staleness_sum"] == 3
    assert statistics["in_queue_staleness_sum"] == 1
    assert statistics["staleness_max"] == 3
    assert statistics["assembled_groups"] == 2
    assert statistics["assembled_groups_spanning_versions"] == 2


async def test_what_is_too_stale_is_dropped_before_assembly(run: Run) -> None:
    await run.create(max_staleness=2, max_queued_groups=9)
    await run.fill("old", head=1)
    await run.fill("edge", head=2)
    await run.fill("new", head=4)
    await run.publish(4)
    assert [g.group_id for g in (await run.batch(0)).shard] == ["edge/0", "new/0"]
    assert await run.ledger() == {"accepted": 3, "delivered": 2, "dropped_stale": 1}
    await run.check()


async def test_eviction_stays_also_when_no_batch_results(run: Run) -> None:
    await run.create(max_staleness=1, max_queued_groups=9)
    await run.fill("old", head=0)
    short = await run.pull(0, train_version=2)
    assert isinstance(short, ops.Short)
    assert short.queued == 0
    assert await run.ledger() == {"accepted": 1, "dropped_stale": 1}


async def test_a_recycled_group_starts_its_task_anew(run: Run) -> None:
    await run.create(max_staleness=1, stale_action=StaleAction.RECYCLE, max_queued_groups=9)
    await run.submit("a", "b")
    a = await run.one_lease()
    await run.push(run.group(a))
    await run.fill("free")
    await run.publish(2)
    await run.pull(0)
    assert await run.ledger() == {"accepted": 2, "recycled": 1, "dropped_stale": 1}
    again = await run.one_lease(loaded=weights(2))
    assert (again.lease_id, again.spec) == ("a/1/1", b"spec-a")
    assert await run.push_kinds(run.group(a), run.group(again, head=2)) == ["closed", "queued"]
    assert await run.queue() == ["a/1"]
    await run.check()


async def test_thousands_of_stale_groups_are_evicted_by_one_pull(run: Run) -> None:
    await run.create(max_staleness=0, max_queued_groups=5000)
    for part in range(5):
        await run.push(*(run.group(f"t{part}-{i}") for i in range(500)))
    before = (await run.view()).revision
    short = await run.pull(0, train_version=1)
    assert isinstance(short, ops.Short)
    assert (short.queued, short.revision) == (0, before + 1)
    assert await run.ledger() == {"accepted": 2500, "dropped_stale": 2500}
    await run.check()
    assert await run.payload_keys() == set()


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 16, 64])
async def test_shards_are_balanced_by_tokens_as_the_domain_says(run: Run, world_size: int) -> None:
    rng = random.Random(world_size)
    count = 40
    await run.create(batch_groups=count)
    tokens = [rng.choice([1, 5, 5, 90, 400, rng.randrange(1000)]) for _ in range(count)]
    await run.push(*(run.group(f"t{i}", tokens=size) for i, size in enumerate(tokens)))
    expected = shard([(i + 1, size) for i, size in enumerate(tokens)], world_size)
    for rank in range(world_size):
        batch = await run.batch(0, rank=rank, world_size=world_size)
        assert [g.sequence for g in batch.shard] == expected[rank]
        assert batch.shard_tokens == sum(tokens[sequence - 1] for sequence in expected[rank])
        assert batch.total_tokens == sum(tokens)


async def test_a_batch_of_several_chunks_is_whole(run: Run) -> None:
    await run.create(batch_groups=1500)
    names = [f"t{i}" for i in range(1500)]
    for first in range(0, 1500, 500):
        await run.push(*(run.group(name) for name in names[first : first + 500]))
    batch = await run.batch(0)
    assert [g.group_id for g in batch.shard] == [f"{name}/0" for name in names]
    assert (await run.batch(0)).shard == batch.shard
    await run.commit(0)
    await run.checkpoint(0)
    await run.check()
    assert await run.payload_keys() == set()


async def test_lost_payloads_are_settled_and_their_tasks_reopened(run: Run) -> None:
    await run.create(batch_groups=3, max_queued_groups=9)
    await run.submit("a")
    await run.push(run.group(await run.one_lease(), tokens=40))
    await run.fill("b", tokens=50)
    await run.fill("c", tokens=60)
    batch = await run.batch(0, world_size=2)
    lost = batch.shard[0].payload_key
    await run.command("UNLINK", lost)
    assert None in await run.store.fetch(run.run_id, [g.payload_key for g in batch.shard])
    for _ in range(2):
        await run.lose(0, "a/0", "c/0", "unknown/0")
    assert await run.ledger() == {"accepted": 3, "delivered": 1, "lost": 2}
    left = [await run.batch(0, rank=rank, world_size=2) for rank in range(2)]
    assert [[g.group_id for g in part.shard] for part in left] in ([["b/0"], []], [[], ["b/0"]])
    assert {(part.total_groups, part.total_tokens) for part in left} == {(1, 50)}
    assert (await run.one_lease()).lease_id == "a/1/1"
    await run.commit(0)
    await run.lose(0, "b/0")
    assert await run.ledger() == {"accepted": 3, "trained": 1, "lost": 2}
    await run.check()


async def test_a_trainer_that_was_superseded_reports_nothing_lost(run: Run) -> None:
    await run.create()
    await run.fill("a", "b")
    read = [group.payload_key for group in (await run.batch(0)).shard]
    before = run.term
    await run.resume(0)
    with pytest.raises(StaleTerm):
        await run.store.call(commands.report_lost(run.run_id, before, 0, read))
    assert [group.group_id for group in (await run.batch(0)).shard] == ["a/0", "b/0"]
    await run.check()


async def test_what_a_deleted_run_has_lost_is_not_lost_to_the_next_one_of_its_name(run: Run) -> None:
    read = []
    for _ in range(2):
        await run.create()
        await run.fill("a", "b")
        read.append([group.payload_key for group in (await run.batch(0)).shard])
        if len(read) == 1:
            await run.store.delete_run(run.run_id)
    # The same step, term, groups and bodies; keys of payloads never come again.
    assert set(read[0]).isdisjoint(read[1])
    await run.store.call(commands.report_lost(run.run_id, run.term, 0, read[0]))
    assert await run.ledger() == {"accepted": 2, "delivered": 2}
    await run.lose(0, "a/0")
    assert await run.ledger() == {"accepted": 2, "delivered": 1, "lost": 1}
    await run.check()
