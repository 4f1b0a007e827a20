"""A step given back in part: groups that the trainer rejects end, and the step takes as many others, once."""

from typing import Any

import pytest

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.rpc.convert.records import event
from buffer_wire.errors import InvalidField, RunPaused, StaleTerm, StepAhead
from tests.store.driver import Run, claim
from tests.store.gathering import gather


async def reject(run: Run, step: int, *ids: str, reason: str = "bad reward", term: int | None = None) -> ops.Rejected:
    request = ops.Reject(term or run.term, step, [f"{name}/0" for name in ids], reason)
    return await run.store.call(commands.reject(run.run_id, request, seen_revision=claim(0)))


def names(batch: ops.Batch) -> list[str]:
    return [group.group_id.removesuffix("/0") for group in batch.shard]


async def amounts(run: Run) -> dict[str, int]:
    view = await run.view()
    groups = {name: amount.groups for name, amount in view.groups.items() if amount.groups}
    assert groups.pop("accepted") == sum(groups.values())
    return groups


async def test_a_step_gets_as_many_others_for_what_is_given_back(run: Run) -> None:
    await run.create(batch_groups=3, max_queued_groups=8)
    await run.fill("a", "b", "c")
    assert names(await run.batch(0)) == ["a", "b", "c"]
    rejected = await reject(run, 0, "a", "c")
    assert (rejected.rejected_groups, rejected.missing_groups, rejected.final) == (2, 2, False)
    assert (rejected.total_groups, rejected.total_tokens, rejected.micro_batch) == (1, 10, 0)
    assert await amounts(run) == {"delivered": 1, "rejected": 2}
    short = await run.short(0, 1)
    assert (short.needed, short.queued) == (2, 0)
    await run.fill("d", "e", "f")
    others = await run.batch(0, 1)
    assert names(others) == ["d", "e"]
    assert (others.final, others.total_groups, others.total_tokens) == (True, 3, 30)
    again = await run.batch(0)
    assert (names(again), again.final, again.replayed) == (["b"], False, True)
    assert await amounts(run) == {"delivered": 3, "rejected": 2, "queued": 1}
    await run.commit(0)
    assert await amounts(run) == {"trained": 3, "rejected": 2, "queued": 1}
    await run.checkpoint(0)
    await run.check()


async def test_a_repeat_rejects_nothing_more(run: Run) -> None:
    await run.create(batch_groups=2, max_queued_groups=8)
    await run.fill("a", "b", "c")
    await run.batch(0)
    first = await reject(run, 0, "a")
    again = await reject(run, 0, "a")
    assert (again.rejected_groups, again.missing_groups, again.revision) == (0, 1, first.revision)
    await run.batch(0, 1)
    after = await reject(run, 0, "a")
    assert (after.rejected_groups, after.missing_groups, after.final, after.micro_batch) == (0, 0, True, 1)
    assert await amounts(run) == {"delivered": 2, "rejected": 1}


async def test_what_came_for_others_may_be_given_back_too(run: Run) -> None:
    await run.create(batch_groups=2, max_queued_groups=8)
    await run.fill("a", "b", "c", "d")
    await run.batch(0)
    await reject(run, 0, "a")
    assert names(await run.batch(0, 1)) == ["c"]
    assert (await reject(run, 0, "b", "c")).missing_groups == 2
    await run.fill("e")
    assert names(await run.batch(0, 2)) == ["d", "e"]
    assert names(await run.batch(0, 1)) == names(await run.batch(0, 0)) == []


async def test_a_group_that_the_step_never_had_is_refused_and_none_is_rejected(run: Run) -> None:
    await run.create(batch_groups=2, max_queued_groups=8)
    await run.fill("a", "b", "c")
    await run.batch(0)
    with pytest.raises(InvalidField, match=r"group_ids\[1\]"):
        await reject(run, 0, "a", "c")
    assert await amounts(run) == {"delivered": 2, "queued": 1}


async def test_only_what_is_neither_committed_nor_to_come_can_be_given_back(run: Run) -> None:
    await run.create(batch_groups=1, max_queued_groups=8)
    await run.fill("a", "b")
    with pytest.raises(StepAhead):
        await reject(run, 0)
    await run.batch(0)
    with pytest.raises(StaleTerm):
        await reject(run, 0, "a", term=7)
    await run.commit(0)
    with pytest.raises(InvalidField, match="at least 1"):
        await reject(run, 0, "a")


async def test_an_open_step_makes_up_for_it_with_its_next_micro_batches(run: Run) -> None:
    await run.create(batch_groups=3, micro_batch_groups=1, max_queued_groups=8)
    await run.fill("a", "b", "c", "d")
    await run.batch(0, 0)
    rejected = await reject(run, 0, "a")
    assert (rejected.missing_groups, rejected.final, rejected.micro_batch) == (3, False, 0)
    assert await amounts(run) == {"rejected": 1, "queued": 3}
    assert [(await run.batch(0, number)).final for number in (1, 2, 3)] == [False, False, True]
    assert (await run.view()).next_step == 1


async def test_a_resumed_trainer_gets_the_step_without_them_and_then_the_others(run: Run) -> None:
    await run.create(batch_groups=3, max_queued_groups=8)
    await run.fill("a", "b", "c")
    await run.batch(0)
    await reject(run, 0, "b")
    await run.resume(0)
    await run.fill("d")
    again = await run.batch(0)
    assert (names(again), again.final, again.replayed) == (["a", "c"], False, True)
    assert (await reject(run, 0, "b")).rejected_groups == 0
    assert names(await run.batch(0, 1)) == ["d"]
    await run.resume(0)
    assert [names(await run.batch(0, number)) for number in (0, 1)] == [["a", "c"], ["d"]]


@pytest.mark.parametrize("mode", [ops.ResumeMode.REQUEUE, ops.ResumeMode.DISCARD])
async def test_a_step_that_is_taken_apart_claims_nothing_any_more(run: Run, mode: ops.ResumeMode) -> None:
    await run.create(batch_groups=2, max_queued_groups=8, max_lookahead=0)
    await run.fill("a", "b")
    await run.batch(0)
    await reject(run, 0, "b")
    await run.resume(0, mode=mode)
    await run.submit("t1", "t2", "t3", "t4")
    left = 2 - (mode is ops.ResumeMode.REQUEUE)
    assert len((await run.lease(4)).grants) == left


async def test_what_a_step_lacks_is_room_for_leases_until_the_commit(run: Run) -> None:
    await run.create(batch_groups=2, max_queued_groups=8, max_lookahead=0, max_staleness=0)
    await run.submit("a", "b", "c", "d", "e")
    grants = (await run.lease(5)).grants
    assert len(grants) == 2
    await run.push(*(run.group(grant) for grant in grants))
    await run.batch(0)
    assert (await run.lease(5)).grants == []
    await reject(run, 0, "a")
    (grant,) = (await run.lease(5)).grants
    assert (await run.lease(5)).grants == []
    await run.push(run.group(grant))
    assert names(await run.batch(0, 1)) == ["c"]
    await reject(run, 0, "b")
    await run.publish(1, commit_through=0)
    loaded = ops.WeightVersion(1, 1)
    assert len((await run.lease(5, loaded=loaded)).grants) == 2


async def test_ranks_get_what_they_lack(run: Run) -> None:
    await run.create(batch_groups=4, equal_shards=True, max_queued_groups=16)
    await run.fill("a", "b", tokens=40)
    await run.fill("c", "d", tokens=10)
    shards = await run.shards(0, world_size=2)
    gone = [name.removesuffix("/0") for name in shards[1]]
    await reject(run, 0, *gone)
    await run.fill("e", "f")
    assert await run.shards(0, 1, world_size=2) == [[], ["e/0", "f/0"]]
    await run.resume(0)
    sizes = [await run.shards(0, number, world_size=4) for number in (0, 1)]
    assert [sum(len(one[rank]) for one in sizes) for rank in range(4)] == [1, 1, 1, 1]


async def test_ranks_of_an_open_step_get_what_they_lack(run: Run) -> None:
    await run.create(batch_groups=4, micro_batch_groups=1, equal_shards=True, max_queued_groups=16)
    await run.fill("a", "b", "c", "d", "e")
    assert await run.shards(0, 0, world_size=2) == [["a/0"], ["b/0"]]
    await reject(run, 0, "b")
    assert await run.shards(0, 1, world_size=2) == [["d/0"], ["c/0"]]
    assert await run.shards(0, 2, world_size=2) == [[], ["e/0"]]
    await run.check()


async def test_ranks_of_an_open_step_get_what_they_lack_of_lost_groups(run: Run) -> None:
    await run.create(batch_groups=4, micro_batch_groups=1, equal_shards=True, max_queued_groups=16)
    await run.fill("a", "b", "c", "d", "e")
    assert await run.shards(0, 0, world_size=2) == [["a/0"], ["b/0"]]
    await run.lose(0, "b/0")
    assert await run.shards(0, 1, world_size=2) == [["d/0"], ["c/0"]]
    assert await run.shards(0, 2, world_size=2) == [[], ["e/0"]]
    await run.check()


async def test_others_are_as_fresh_as_the_step_asks_for(run: Run) -> None:
    await run.create(batch_groups=1, max_queued_groups=8, max_staleness=1)
    await run.publish(3)
    await run.fill("a", head=3)
    await run.batch(0)
    await reject(run, 0, "a")
    await run.fill("old", head=1)
    assert (await run.short(0, 1)).queued == 0
    await run.fill("b", head=2)
    assert (await run.batch(0, 1)).staleness_sum == 1


async def test_others_are_taken_from_what_the_next_step_gathers(run: Run) -> None:
    run.portion = 1
    await run.create(batch_groups=2, max_queued_groups=8)
    await run.fill("a", "b", "c", "d")
    await run.batch(0)
    await reject(run, 0, "a")
    await gather(run, 1, groups=1, step=1)
    await reject(run, 0, "b")
    assert sorted(names(await run.batch(0, 1))) == ["c", "d"]


async def test_a_drained_run_says_that_no_others_come(run: Run) -> None:
    await run.create(batch_groups=1, max_queued_groups=8)
    await run.fill("a")
    await run.batch(0)
    await reject(run, 0, "a")
    await run.store.call(commands.drain_run(run.run_id))
    with pytest.raises(RunPaused, match="drained"):
        await run.pull(0, 1)


async def test_the_recording_says_why(run: Run) -> None:
    await run.create(batch_groups=1, max_queued_groups=8, record_groups=True)
    await run.fill("a")
    await run.batch(0)
    await reject(run, 0, "a", reason="no answer")
    moved: list[Any] = [event(one).message.moved for one in await run.store.records(run.run_id, "0", 100)]
    assert [(one.group_id, one.state, one.reason) for one in moved if one.state] == [("a/0", "rejected", "no answer")]


async def test_a_first_release_must_not_go_on_with_the_run(run: Run) -> None:
    await run.create(batch_groups=1, max_queued_groups=8)
    await run.fill("a")
    await run.batch(0)
    await reject(run, 0)
    assert (await run.hash("run"))["layout"].isdigit()
    await reject(run, 0, "a")
    assert not (await run.hash("run"))["layout"].isdigit()
