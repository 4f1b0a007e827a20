"""Streaming: steps that are closed micro-batch by micro-batch."""

from typing import Any

import msgpack
import pytest

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.store.redis_store import RedisRunStore
from buffer_wire.errors import InvalidField, RunPaused, StepAhead
from tests.store.driver import Run, beside, weights

REPLAY, REQUEUE, DISCARD = ops.ResumeMode.REPLAY, ops.ResumeMode.REQUEUE, ops.ResumeMode.DISCARD

STREAMED = {"batch_groups": 6, "micro_batch_groups": 1, "max_queued_groups": 6}
"""Steps of 6 groups in micro-batches of one group a rank."""


async def fill(run: Run, count: int, first: int = 0, **kwargs: Any) -> None:
    await run.fill(*(f"t{i}" for i in range(first, first + count)), **kwargs)


def ids(batch: ops.Batch) -> list[str]:
    return [group.group_id for group in batch.shard]


async def test_a_step_is_closed_micro_batch_by_micro_batch(run: Run) -> None:
    await run.create(**STREAMED)
    await fill(run, 3)
    first = await run.batch(0, world_size=2)
    assert (first.step, first.micro_batch, first.final, first.replayed) == (0, 0, False, False)
    assert (first.total_groups, first.total_tokens, first.total_samples, first.total_loss_tokens) == (2, 20, 8, 10)
    assert await run.ledger() == {"accepted": 3, "queued": 1, "forming": 2}
    short = await run.short(0, 1, world_size=2)
    assert (short.queued, short.needed) == (1, 2)
    assert (await run.view()).next_step == 0

    await fill(run, 3, 3)
    second = await run.batch(0, 1, world_size=2)
    assert (second.micro_batch, second.final, second.total_groups) == (1, False, 4)
    last = await run.batch(0, 2, world_size=2)
    assert (last.final, last.total_groups, last.queued) == (True, 6, 0)
    assert await run.ledger() == {"accepted": 6, "delivered": 6}
    assert [await run.shards(0, micro_batch, world_size=2) for micro_batch in range(3)] == [
        [["t0/0"], ["t1/0"]],
        [["t2/0"], ["t3/0"]],
        [["t4/0"], ["t5/0"]],
    ]
    assert (await run.view()).next_step == 1
    await run.commit(0)
    assert await run.ledger() == {"accepted": 6, "trained": 6}
    await run.checkpoint(0)
    await run.check()
    assert await run.payload_keys() == set()


async def test_a_closed_micro_batch_is_the_same_whoever_asks_and_when(run: Run) -> None:
    await run.create(**STREAMED)
    await fill(run, 6)
    micro_batches = [await run.batch(0, micro_batch, world_size=2) for micro_batch in range(2)]
    before = (await run.view()).revision
    for micro_batch, batch in enumerate(micro_batches):
        again = await run.batch(0, micro_batch, world_size=2)
        assert (again.shard, again.total_groups, again.final) == (batch.shard, batch.total_groups, False)
        assert again.replayed
    assert (await run.view()).revision == before
    await run.batch(0, 2, world_size=2)
    assert [(await run.batch(0, micro_batch, world_size=2)).final for micro_batch in range(3)] == [False, False, True]


async def test_the_last_micro_batch_takes_what_the_step_still_needs(run: Run) -> None:
    await run.create(batch_groups=5, micro_batch_groups=2, max_queued_groups=8)
    await fill(run, 7)
    assert [(await run.batch(0, micro_batch)).total_groups for micro_batch in range(3)] == [2, 4, 5]
    assert (await run.view()).next_step == 1
    assert await run.ledger() == {"accepted": 7, "queued": 2, "delivered": 5}


async def test_micro_batches_out_of_turn_are_refused(run: Run) -> None:
    await run.create(**STREAMED)
    with pytest.raises(InvalidField, match="micro_batch is 1; it must be at most 0, the next micro-batch of step 0"):
        await run.pull(0, 1)
    await fill(run, 6)
    await run.batch(0, world_size=2)
    with pytest.raises(InvalidField, match="micro_batch is 2; it must be at most 1, the next micro-batch of step 0"):
        await run.pull(0, 2, world_size=2)
    with pytest.raises(StepAhead):
        await run.pull(1, world_size=2)
    with pytest.raises(StepAhead):
        await run.commit(0)
    for micro_batch in (1, 2):
        await run.batch(0, micro_batch, world_size=2)
    with pytest.raises(InvalidField, match="micro_batch is 3; it must be below 3, the micro-batches of step 0"):
        await run.pull(0, 3, world_size=2)


async def test_a_whole_batch_has_one_micro_batch(run: Run) -> None:
    await run.create()
    await fill(run, 2)
    batch = await run.batch(0)
    assert (batch.micro_batch, batch.final) == (0, True)
    with pytest.raises(InvalidField, match="micro_batch is 1; it must be below 1, the micro-batches of step 0"):
        await run.pull(0, 1)
    with pytest.raises(InvalidField, match="micro_batch is 1; it must be at most 0"):
        await run.pull(1, 1)


async def test_the_first_micro_batch_fixes_the_train_version(run: Run) -> None:
    await run.create(**STREAMED, max_staleness=2)
    await fill(run, 2, head=0)
    assert (await run.batch(0, train_version=2)).train_version == 2
    await run.publish(2)
    await run.publish(3)
    with pytest.raises(InvalidField, match="train_version is 3; it must be 2, that of the step's first micro-batch"):
        await run.pull(0, 1, train_version=3)
    # The gate is that of the step: 2 - 0 is within bounds, though the published version is 3.
    assert [(await run.batch(0, 1, train_version=given)).train_version for given in (None, 2)] == [2, 2]
    await fill(run, 4, 2, head=3)
    for micro_batch in range(2, 6):
        assert (await run.batch(0, micro_batch)).train_version == 2
    await fill(run, 1, 6, head=3)
    assert (await run.batch(1)).train_version == 3


async def test_a_later_micro_batch_evicts_by_the_steps_train_version(run: Run) -> None:
    await run.create(**STREAMED, max_staleness=1)
    await fill(run, 1, head=3)
    await fill(run, 1, 1, head=1)
    await run.batch(0, train_version=3)
    short = await run.short(0, 1)
    assert (short.queued, short.needed) == (0, 1)
    assert await run.ledger() == {"accepted": 2, "forming": 1, "dropped_stale": 1}


async def test_an_open_step_keeps_its_mode_whatever_the_policy_becomes(run: Run) -> None:
    await run.create(**STREAMED)
    await fill(run, 3)
    await run.batch(0)
    policy = (await run.view()).policy
    changed = type(policy)(batch_groups=3, micro_batch_groups=0, max_queued_groups=6)
    await run.store.call(commands.update_policy(run.run_id, changed))
    assert [(await run.batch(0, micro_batch)).final for micro_batch in (1, 2)] == [False, False]
    await fill(run, 3, 3)
    assert [(await run.batch(0, micro_batch)).final for micro_batch in (3, 4, 5)] == [False, False, True]
    await fill(run, 3, 6)
    whole = await run.batch(1)
    assert (whole.final, whole.total_groups) == (True, 3)
    await run.check()


async def test_a_trainer_may_choose_the_size_of_its_step(run: Run) -> None:
    await run.create(**STREAMED)
    await fill(run, 6)
    for wrong in (0, 65_537):
        with pytest.raises(InvalidField, match=f"batch_groups is {wrong}; it must be 1 to 65536"):
            await run.pull(0, batch_groups=wrong)
    assert [(await run.batch(0, micro_batch, batch_groups=n)).final for micro_batch, n in enumerate((3, 9, 1))] == [
        False,
        False,
        True,
    ]
    assert [(await run.batch(1, micro_batch, batch_groups=2)).final for micro_batch in range(2)] == [False, True]


async def test_a_token_budget_ends_a_step_early(run: Run) -> None:
    await run.create(**STREAMED, batch_tokens=25)
    await fill(run, 5)
    assert [(await run.batch(0, micro_batch)).final for micro_batch in range(3)] == [False, False, True]
    assert (await run.view()).next_step == 1
    assert not (await run.batch(1)).final


async def test_equal_shards_need_steps_that_divide(run: Run) -> None:
    await run.create(**STREAMED, equal_shards=True)
    await fill(run, 6)
    with pytest.raises(InvalidField, match="world_size is 4; it must be a divisor of batch_groups 6"):
        await run.pull(0, world_size=4)
    assert [len(shard) for shard in await run.shards(0, world_size=3)] == [1, 1, 1]


async def test_a_micro_batch_that_the_queue_cannot_hold_is_refused(run: Run) -> None:
    await run.create(batch_groups=12, micro_batch_groups=2, max_queued_groups=5)
    with pytest.raises(InvalidField, match="world_size is 3; it must be at most 2 ranks: a micro-batch of world_size"):
        await run.pull(0, world_size=3)
    assert (await run.short(0, world_size=2)).needed == 4


async def test_shards_of_a_micro_batch_are_balanced_by_tokens(run: Run) -> None:
    await run.create(batch_groups=8, micro_batch_groups=4, max_queued_groups=8)
    for name, tokens in zip("abcdefgh", (90, 10, 20, 30, 5, 5, 5, 5), strict=True):
        await run.fill(name, tokens=tokens)
    assert await run.shards(0, world_size=2) == [["a/0"], ["b/0", "c/0", "d/0", "e/0", "f/0", "g/0", "h/0"]]


async def test_statistics_and_staleness_grow_with_the_micro_batches(run: Run) -> None:
    await run.create(**STREAMED)
    await run.publish(4)
    await run.fill("a", head=1, tail=3)
    await run.fill("b", head=4)
    await run.fill("c", head=2)
    totals = [await run.batch(0, micro_batch) for micro_batch in range(3)]
    assert [(batch.staleness_sum, batch.staleness_max) for batch in totals] == [(3, 3), (3, 3), (5, 3)]
    statistics = (await run.view()).statistics
    assert (statistics["staleness_sum"], statistics["assembled_groups"], statistics["staleness_max"]) == (5, 3, 3)
    assert statistics["assembled_groups_spanning_versions"] == 1


async def test_lost_groups_of_an_open_step_are_filled_up_again(run: Run) -> None:
    await run.create(batch_groups=4, micro_batch_groups=2, max_queued_groups=8)
    await run.submit("t0")
    await run.push(run.group(await run.one_lease(), tokens=40))
    await fill(run, 2, 1)
    await run.batch(0)
    for _ in range(2):
        await run.lose(0, "t0/0", "t2/0")
    assert await run.ledger() == {"accepted": 3, "queued": 1, "forming": 1, "lost": 1}
    left = await run.batch(0)
    assert (ids(left), left.total_groups, left.total_tokens) == (["t1/0"], 1, 10)
    assert (await run.one_lease()).lease_id == "t0/1/1"
    await fill(run, 4, 3)
    second = await run.batch(0, 1)
    assert (ids(second), second.total_groups, second.final) == (["t2/0", "t3/0"], 3, False)
    last = await run.batch(0, 2)
    assert (ids(last), last.total_groups, last.final) == (["t4/0"], 4, True)
    # A group that is lost after the step is complete leaves its micro-batch, and the sums of all later ones.
    await run.lose(0, "t3/0")
    assert [(await run.batch(0, micro_batch)).total_groups for micro_batch in range(3)] == [1, 2, 3]
    assert await run.ledger() == {"accepted": 7, "queued": 2, "delivered": 3, "lost": 2}
    await run.check()


async def test_micro_batches_are_served_while_the_run_is_paused(run: Run) -> None:
    await run.create(**STREAMED)
    await fill(run, 4)
    first = await run.batch(0)
    await run.store.call(commands.pause_run(run.run_id))
    assert (await run.batch(0)).shard == first.shard
    with pytest.raises(RunPaused, match="operator"):
        await run.pull(0, 1)
    await run.store.call(commands.continue_run(run.run_id))
    assert ids(await run.batch(0, 1)) == ["t1/0"]


async def test_micro_batches_survive_a_restart_of_the_service(run: Run, store: RedisRunStore) -> None:
    await run.create(**STREAMED)
    await fill(run, 6)
    first = [await run.batch(0, micro_batch, world_size=2) for micro_batch in range(2)]
    other = await beside(store)
    try:
        later = Run(other)
        assert [(await later.batch(0, micro_batch, world_size=2)).shard for micro_batch in range(2)] == [
            b.shard for b in first
        ]
        assert (await later.batch(0, 2, world_size=2)).final
    finally:
        await other.close()


async def test_a_step_of_many_micro_batches_is_freed_whole(run: Run) -> None:
    await run.create(batch_groups=1_200, micro_batch_groups=1, max_queued_groups=600)
    for part in range(2):
        for first in range(0, 600, 200):
            await run.push(*(run.group(f"t{part}-{first + i}") for i in range(200)))
        for micro_batch in range(part * 150, part * 150 + 150):
            await run.batch(0, micro_batch, world_size=4)
    assert (await run.view()).next_step == 1
    await run.commit(0)
    await run.checkpoint(0)
    assert await run.command("HLEN", f"rb:{{{run.run_id}}}:chunks") == 0
    assert await run.command("HLEN", f"rb:{{{run.run_id}}}:micro-batches") == 0
    await run.check()
    assert await run.payload_keys() == set()


async def test_micro_batches_and_what_was_trained_are_recorded(run: Run) -> None:
    await run.create(batch_groups=2, micro_batch_groups=1, record_groups=True)
    await fill(run, 2)
    for micro_batch in range(2):
        await run.batch(0, micro_batch, train_version=7)
    await run.commit(0)
    records = await run.store.records(run.run_id, "", 100)
    events = [(record.kind, msgpack.unpackb(record.data)) for record in records if record.kind != "accepted"]
    assert events == [
        ("micro_batch", [run.now, 0, 0, 7, ["t0/0"]]),
        ("micro_batch", [run.now, 0, 1, 7, ["t1/0"]]),
        ("trained", [run.now, 1]),
    ]


async def test_going_back_to_the_queue_is_recorded(run: Run) -> None:
    await run.create(record_groups=True, max_queued_groups=2)
    await fill(run, 2)
    await run.batch(0)
    await run.resume(0, REQUEUE)
    await run.resume(0, DISCARD)
    await run.batch(0)
    await run.resume(0, DISCARD)
    moved = [msgpack.unpackb(r.data) for r in await run.store.records(run.run_id, "", 100) if r.kind == "moved"]
    assert sorted(moved) == [[run.now, f"t{i}/0", state] for i in range(2) for state in ("discarded", "queued")]


async def test_a_first_micro_batch_makes_the_clock_of_leases_wait_for_the_whole_step(run: Run) -> None:
    await run.create(**STREAMED, max_staleness=1)
    await run.submit("a")
    await fill(run, 6)
    for micro_batch in range(5):
        await run.batch(0, micro_batch)
    # The step that is forming counts as the next one until its last micro-batch.
    assert len((await run.lease(loaded=weights(0))).grants) == 1
