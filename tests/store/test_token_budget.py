"""Batches by tokens, batches of a chosen size, equal shards."""

import random
from typing import Any

import msgpack
import pytest

from buffer_service.domain.policy import EnvironmentRule
from buffer_wire.errors import InvalidField
from tests.store.driver import Run


async def fill(run: Run, *tokens: int) -> None:
    """Groups g0, g1, ... of these sizes."""
    await run.push(*(run.group(f"g{i}", tokens=size) for i, size in enumerate(tokens)))


async def taken(run: Run, step: int, **kwargs: int) -> list[str]:
    return [group.group_id for group in (await run.batch(step, **kwargs)).shard]


async def test_a_batch_is_ready_as_soon_as_its_tokens_are_queued(run: Run) -> None:
    await run.create(batch_groups=10, batch_tokens=100)
    await fill(run, 40, 40, 19)
    short = await run.short(0)
    assert (short.queued, short.needed) == (3, 10)
    await run.fill("more", tokens=1)
    batch = await run.batch(0)
    assert (batch.total_groups, batch.total_tokens, batch.queued) == (4, 100, 0)


async def test_a_batch_stops_before_the_group_that_would_exceed_its_tokens(run: Run) -> None:
    await run.create(batch_groups=10, batch_tokens=100)
    await fill(run, 40, 50, 30, 5)
    assert await taken(run, 0) == ["g0/0", "g1/0"]
    assert await run.queue() == ["g2/0", "g3/0"]
    await run.check()


async def test_a_group_above_the_budget_is_a_batch_of_its_own(run: Run) -> None:
    await run.create(batch_groups=10, batch_tokens=100)
    await fill(run, 400, 1)
    assert await taken(run, 0) == ["g0/0"]


async def test_the_number_of_groups_is_a_bound_beside_the_tokens(run: Run) -> None:
    await run.create(batch_groups=2, batch_tokens=100, max_queued_groups=9)
    await fill(run, 10, 10, 10)
    assert await taken(run, 0) == ["g0/0", "g1/0"]


async def test_a_trainer_may_choose_the_size_of_its_batch(run: Run) -> None:
    await run.create(batch_groups=2, max_queued_groups=4)
    await fill(run, 1, 1, 1, 1)
    for wrong in (0, 5):
        with pytest.raises(InvalidField, match=f"batch_groups is {wrong}; it must be 1 to 4"):
            await run.pull(0, batch_groups=wrong)
    assert await taken(run, 0, batch_groups=1) == ["g0/0"]
    assert await taken(run, 1, batch_groups=3) == ["g1/0", "g2/0", "g3/0"]
    # What is stored stays, whatever is asked for.
    assert await taken(run, 0, batch_groups=4) == ["g0/0"]
    assert (await run.short(2, batch_groups=3)).needed == 3


async def test_equal_shards_have_the_same_number_of_groups(run: Run) -> None:
    await run.create(batch_groups=6, equal_shards=True)
    await fill(run, 100, 1, 2, 3, 4, 5)
    with pytest.raises(InvalidField, match="world_size is 4; it must be a divisor of batch_groups 6"):
        await run.pull(0, world_size=4)
    assert await run.shards(0, world_size=3) == [["g0/0", "g1/0"], ["g2/0", "g5/0"], ["g3/0", "g4/0"]]


async def test_equal_shards_take_multiples_of_the_ranks_within_the_budget(run: Run) -> None:
    await run.create(batch_groups=10, batch_tokens=100, equal_shards=True)
    await fill(run, 20, 20, 20, 20, 20, 1)
    assert [len(shard) for shard in await run.shards(0, world_size=2)] == [2, 2]
    assert await run.queue() == ["g4/0", "g5/0"]


async def test_equal_shards_give_every_rank_a_group_whatever_its_tokens(run: Run) -> None:
    await run.create(batch_groups=10, batch_tokens=100, equal_shards=True)
    await fill(run, 90, 90)
    short = await run.short(0, world_size=3)
    assert (short.queued, short.needed) == (2, 10)
    await run.fill("third", tokens=90)
    assert await run.shards(0, world_size=3) == [["g0/0"], ["g1/0"], ["third/0"]]


async def picked(run: Run, batches: int, **policy: Any) -> list[str]:
    """Group ids of `batches` batches in order of pick, from two environments that share 3 to 1."""
    shares = (EnvironmentRule(environment="a", share=3), EnvironmentRule(environment="b", share=1))
    await run.create(**policy, environments=shares, record_groups=True, max_queued_groups=40)
    rng = random.Random(7)
    for index in range(40):
        await run.fill(f"g{index}", tokens=rng.randrange(10, 60), environment="ab"[index % 2])
    for step in range(batches):
        await run.batch(step)
    records = await run.store.records(run.run_id, "", 1000)
    return [
        group_id for record in records if record.kind == "micro_batch" for group_id in msgpack.unpackb(record.data)[4]
    ]


async def test_a_group_that_is_left_for_the_budget_costs_its_environment_no_turn(run: Run) -> None:
    cut = await picked(run, 6, batch_groups=40, batch_tokens=150)
    assert 12 < len(cut) < 30
    whole = await picked(Run(run.store, "another"), 1, batch_groups=30)
    assert cut == whole[: len(cut)]


async def test_no_pull_asks_for_more_groups_than_one_script_should_take(run: Run) -> None:
    await run.create(batch_groups=2, max_queued_groups=1_000_000)
    assert (await run.short(0, batch_groups=65_536)).needed == 65_536
    with pytest.raises(InvalidField, match="batch_groups is 65537; it must be 1 to 65536"):
        await run.pull(0, batch_groups=65_537)
