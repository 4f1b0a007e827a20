"""Lists of groups and steps, compared with what was put in; and what their pages promise while the run goes on."""

from collections import Counter

import pytest

from buffer_service import commands
from buffer_service.domain import inspection as ins
from buffer_wire.errors import InvalidField, ReplayGap, StepAhead
from tests.store.driver import Run
from tests.store.inspect.listing import all_groups, all_steps, all_tasks, groups, ids


async def test_queued_groups_come_in_order_of_acceptance_over_all_subqueues(run: Run) -> None:
    await run.create(max_queued_groups=100)
    await run.submit(*((f"p{i}", i % 3) for i in range(9)), environment="a")
    names = []
    for grant in (await run.lease(9)).grants:
        names.append(f"{grant.task_id}/0")
        assert await run.push_kinds(run.group(grant, environment="a")) == ["queued"]
    await run.fill("x", "y", environment="b")
    for limit in (1, 2, 5, 100):
        assert ids(await all_groups(run, None, limit)) == [*names, "x/0", "y/0"]
        assert ids(await all_groups(run, None, limit, environment="b")) == ["x/0", "y/0"]
    assert await run.queue() == [*names, "x/0", "y/0"]


async def test_a_groups_facts_are_those_that_were_pushed(run: Run) -> None:
    await run.create()
    await run.fill("g", head=0, tokens=40, samples=2, lengths=(5, 9), rewards=(0.25, 1.0), turns=3, truncated=1)
    (group,) = await all_groups(run)
    assert group == ins.GroupView(
        group_id="g/0", task_id="g", sequence=1, environment="env", priority=0, samples=2, tokens=40,
        response_tokens=14, longest_tokens=9, loss_tokens=20, size_bytes=len(b"body-g"), head=0, tail=0, mean_milli=0,
        reward_milli=1250, turns=3, truncated_samples=1, micro_batch=-1, rank=-1,
    )  # fmt: skip


async def test_queued_groups_that_stay_are_listed_once_although_others_come_and_go(run: Run) -> None:
    await run.create(max_queued_groups=1_000, batch_groups=2, order="lifo")
    names = [f"g{i:03d}" for i in range(50)]
    for i, name in enumerate(names):
        await run.fill(name, environment="ab"[i % 2])
    seen: list[str] = []
    page, step = await groups(run, None, (), 6), 0
    while True:
        seen += ids(page.items)
        if not page.following:
            break
        # The newest ones leave, and newer ones come.
        await run.batch(step)
        await run.fill(f"new{step}", environment="c")
        step += 1
        page = await groups(run, None, page.following, 6)
    still = await run.queue()
    stayed = [f"{name}/0" for name in names if f"{name}/0" in still]
    assert [name for name in seen if name in stayed] == stayed
    assert max(Counter(seen).values()) == 1
    assert step > 5


async def test_groups_of_a_step_come_by_micro_batch_and_rank(run: Run) -> None:
    await run.create(batch_groups=6, micro_batch_groups=1, max_queued_groups=6)
    await run.fill(*(f"g{i}" for i in range(4)))
    shards = await run.shards(0, 0, world_size=2)
    shards += await run.shards(0, 1, world_size=2)
    place, page = await run.store.call(commands.list_groups(run.run_id, 0, (), 100, environment=None))
    assert place == "forming"
    assert ids(page.items) == [group for shard in shards for group in shard]
    assert [(group.micro_batch, group.rank) for group in page.items] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for limit in (1, 2, 3):
        assert ids(await all_groups(run, 0, limit)) == ids(page.items)
    with pytest.raises(StepAhead):
        await groups(run, 1)


async def test_a_step_of_more_ranks_than_groups_is_listed_whole(run: Run) -> None:
    await run.create(batch_groups=2)
    await run.fill("g1", "g2")
    await run.batch(0, world_size=7)
    for limit in (1, 2, 3, 100):
        assert sorted(ids(await all_groups(run, 0, limit))) == ["g1/0", "g2/0"]


async def test_a_large_step_is_listed_over_its_chunks_while_groups_of_it_are_lost(run: Run) -> None:
    await run.create(batch_groups=600, max_queued_groups=600)
    new = [run.group(f"g{i:03d}", environment="ab"[i % 2]) for i in range(600)]
    assert set(await run.push_kinds(*new)) == {"queued"}
    await run.batch(0)
    first = await groups(run, 0, (), 256)
    lost = ["g000/0", "g255/0", "g300/0"]
    await run.lose(0, *lost)
    seen = ids(first.items)
    page = first
    while page.following:
        page = await groups(run, 0, page.following, 100)
        seen += ids(page.items)
    assert [name for name in seen if name not in lost] == [
        f"g{i:03d}/0" for i in range(600) if f"g{i:03d}/0" not in lost
    ]
    of_b = await all_groups(run, 0, 50, environment="b")
    assert len(of_b) == 300 - 1
    assert {group.environment for group in of_b} == {"b"}


async def test_a_page_of_shards_that_are_no_more_is_refused(run: Run) -> None:
    await run.create(batch_groups=4, max_queued_groups=4)
    await run.fill("a", "b", "c", "d")
    await run.shards(0, world_size=2)
    page = await groups(run, 0, (), 2)
    await run.resume(0)
    with pytest.raises(InvalidField, match="page_token"):
        await groups(run, 0, page.following, 2)
    page = await groups(run, 0, (), 2)
    await run.shards(0, world_size=1)
    with pytest.raises(InvalidField, match="list it anew"):
        await groups(run, 0, page.following, 2)
    assert len(await all_groups(run, 0, 2)) == 4


# ── steps ────────────────────────────────────────────────────────────────────


async def test_steps_come_newest_first_as_they_were_assembled(run: Run) -> None:
    await run.create(batch_groups=2, max_queued_groups=20, retained_steps=2)
    for step in range(5):
        await run.fill(f"a{step}", f"b{step}", tokens=10 + step)
        await run.batch(step)
    await run.publish(1, 3)
    for limit in (1, 2, 100):
        steps = await all_steps(run, limit)
        assert [(step.step, step.place) for step in steps] == [(4, "delivered"), (3, "trained"), (2, "trained")]
    assert (await all_steps(run))[0] == ins.StepView(
        step=4, place=ins.Place.DELIVERED, train_version=0, target_groups=2, micro_batch_groups=0,
        micro_batches=1, ranks=1,
        groups=2, samples=8, tokens=28, loss_tokens=14, size_bytes=2 * len(b"body-a4"), staleness_sum=0,
        staleness_max=0,
    )  # fmt: skip
    with pytest.raises(ReplayGap):
        await groups(run, 1)


async def test_a_new_run_has_nothing_to_list(run: Run) -> None:
    await run.create()
    assert (await run.store.call(commands.list_steps(run.run_id, (), 10))).items == []
    for which in ins.TaskSet:
        assert await all_tasks(run, which) == []
    assert await all_groups(run) == []
    waits = await run.store.waits(run.run_id, 10)
    assert (waits.blocked, waits.leased, waits.workers, waits.needed_groups) == (0, 0, 0, 0)
