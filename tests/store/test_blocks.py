"""Records of queued groups lie in blocks of 1,000 sequences: what is picked across blocks, and what is left of them."""

import pytest

from buffer_service.commands.replies import text, unpack
from buffer_service.domain import ops
from buffer_service.domain.policy import EnvironmentRule, Order
from buffer_service.store.keys import index_key
from tests.store.driver import Run

SHARES = (EnvironmentRule(environment="even", share=1), EnvironmentRule(environment="odd", share=3))


async def fill(run: Run, count: int) -> None:
    """Queue groups g0, g1, ..., whose sequences are 1, 2, ..., in two environments by turns."""
    groups = (run.group(f"g{i}", f"body-{i}".encode(), environment=("even", "odd")[i % 2]) for i in range(count))
    assert set(await run.push_kinds(*groups)) == {"queued"}


async def blocks(run: Run) -> dict[str, int]:
    """Number of records of each block."""
    keys = await run.command("KEYS", index_key(run.run_id, "groups:*"))
    return {text(key).rpartition(":")[2]: await run.command("HLEN", key) for key in keys}


async def test_a_block_has_a_thousand_sequences_and_goes_with_its_last_record(run: Run) -> None:
    await run.create(batch_groups=999, max_queued_groups=3000)
    await fill(run, 2100)
    assert await blocks(run) == {"000000000000": 999, "000000000001": 1000, "000000000002": 101}
    await run.batch(0)
    assert await blocks(run) == {"000000000001": 1000, "000000000002": 101}
    await run.check()
    await run.batch(1)
    assert await blocks(run) == {"000000000001": 1, "000000000002": 101}
    await run.check()
    await run.store.delete_run(run.run_id)
    assert await blocks(run) == {}


@pytest.mark.parametrize(
    ("order", "rules", "expected"),
    [
        (Order.FIFO, (), range(1040)),
        (Order.LIFO, (), range(60, 1100)),
        (Order.STALEST_FIRST, (), range(1040)),
        # With shares of 1 to 3 all 550 odd ones leave, and of the even ones what is missing.
        (Order.FIFO, SHARES, sorted([*range(1, 1100, 2), *range(0, 980, 2)])),
    ],
)
async def test_a_batch_that_is_picked_across_blocks_has_the_right_groups_with_their_payloads(
    run: Run, order: Order, rules: tuple[EnvironmentRule, ...], expected: list[int]
) -> None:
    await run.create(batch_groups=1040, max_queued_groups=2000, order=order, environments=rules)
    await fill(run, 1100)
    batch = await run.batch(0)
    assert [group.group_id for group in batch.shard] == [f"g{i}/0" for i in expected]
    assert await run.bodies(batch) == [f"body-{i}".encode() for i in expected]
    await run.check()


@pytest.mark.parametrize("count", [1, 15, 16, 255, 256, 257])
async def test_a_chunk_is_an_array_of_the_records_as_they_were_queued(run: Run, count: int) -> None:
    await run.create(batch_groups=count, max_queued_groups=600)
    await fill(run, count)
    queued = [record for _, record in sorted((await run.queued_records()).items())]
    await run.batch(0)
    chunks = sorted((await run.hash("chunks")).items())
    assert [record for _, packed in chunks for record in unpack(packed)] == queued


async def test_what_was_queued_before_a_resume_is_packed_as_of_the_new_timeline(run: Run) -> None:
    await run.create(batch_groups=2, max_queued_groups=9)
    await run.fill("x", "y")
    await run.batch(0)
    await run.publish(7, commit_through=0)
    await run.fill("old", head=6)
    await run.resume(0, ops.ResumeMode.DISCARD)
    await run.fill("new", head=0)
    await run.batch(0)
    ((_, packed),) = (await run.hash("chunks")).items()
    assert [(text(record[0]), record[4], record[6]) for record in unpack(packed)] == [("old/0", 0, 2), ("new/0", 0, 2)]
