"""Retention by bytes: trained steps that nobody checkpoints do not fill the store."""

import pytest

from buffer_service.domain import ops
from buffer_wire.errors import ReplayGap
from tests.store.driver import Run


async def steps(run: Run, *sizes: int) -> None:
    """One step of one group for each size in bytes, trained."""
    first = (await run.view()).next_step
    for step, size in enumerate(sizes, first):
        await run.fill(f"s{step}", size=size)
        await run.batch(step)
        await run.commit(step)


async def released(run: Run) -> int:
    return (await run.view()).checkpointed_steps


async def test_trained_steps_beyond_the_bytes_are_released_oldest_first(run: Run) -> None:
    await run.create(batch_groups=1, max_retained_bytes=1000)
    await steps(run, 400, 400, 200)
    assert await released(run) == 0
    await steps(run, 1)
    assert await released(run) == 1
    await steps(run, 700)
    assert await released(run) == 2
    with pytest.raises(ReplayGap):
        await run.pull(1)
    assert (await run.batch(2)).replayed
    await run.check()
    assert len(await run.payload_keys()) == 3


async def test_a_step_above_the_bytes_is_released_at_once(run: Run) -> None:
    await run.create(batch_groups=1, max_retained_bytes=1000)
    await steps(run, 10, 1001)
    assert await released(run) == 2
    await run.check()
    assert await run.payload_keys() == set()


async def test_steps_and_bytes_are_both_bounds(run: Run) -> None:
    await run.create(batch_groups=1, max_retained_bytes=1000, retained_steps=2)
    await steps(run, 10, 10, 10)
    assert await released(run) == 1
    await steps(run, 995)
    assert await released(run) == 3


async def test_what_a_trainer_has_not_committed_is_never_released(run: Run) -> None:
    await run.create(batch_groups=1, max_retained_bytes=1000)
    for step in range(3):
        await run.fill(f"s{step}", size=900)
        await run.batch(step)
    await run.commit(0)
    assert await released(run) == 0
    await run.commit(2)
    assert await released(run) == 2


async def test_checkpoints_make_room_for_later_steps(run: Run) -> None:
    await run.create(batch_groups=1, max_retained_bytes=1000)
    await steps(run, 600)
    await run.checkpoint(0)
    await steps(run, 600, 400)
    assert await released(run) == 1


async def test_lost_groups_count_no_more(run: Run) -> None:
    await run.create(batch_groups=2, max_retained_bytes=1000)
    await run.fill("a", "b", size=500)
    await run.batch(0)
    await run.lose(0, "a/0")
    await run.commit(0)
    await run.fill("c", "d", size=250)
    await run.batch(1)
    await run.commit(1)
    assert await released(run) == 0


@pytest.mark.parametrize("mode", list(ops.ResumeMode))
async def test_bytes_that_a_resume_takes_back_count_no_more(run: Run, mode: ops.ResumeMode) -> None:
    await run.create(batch_groups=1, max_retained_bytes=1000, max_queued_groups=9)
    await steps(run, 300, 300, 300)
    await run.resume(1, mode)
    if mode is ops.ResumeMode.DISCARD:
        await run.fill("n1", "n2", size=300)
    for step in (1, 2):
        await run.batch(step)
        await run.commit(step)
    assert await released(run) == 0
    await run.fill("last", size=101)
    await run.batch(3)
    await run.commit(3)
    assert await released(run) == 1
    await run.check()
