"""max_lookahead counts steps: it never shuts a trainer out that keeps to its policy, and never loses its bound."""

from typing import Any

import pytest

from buffer_service.domain import ops
from buffer_service.domain.policy import OverflowAction
from buffer_wire.errors import InvalidField
from tests.store.driver import Run, weights


async def granted(run: Run) -> int:
    return len((await run.lease(50)).grants)


async def feed(run: Run) -> None:
    await run.submit(*(f"t{i}" for i in range(40)))


async def test_a_step_committed_without_a_publish_is_behind_a_resumed_trainer(run: Run) -> None:
    await run.create(max_lookahead=0)
    await run.fill("a", "b")
    await run.batch(0)
    await run.commit(0)
    await run.resume()
    await feed(run)
    assert await granted(run) == 2


async def test_smaller_batches_do_not_widen_it(run: Run) -> None:
    await run.create(max_lookahead=0, max_queued_groups=9)
    for step in range(3):
        await run.fill(f"s{step}")
        await run.batch(step, batch_groups=1)
        await run.publish(step + 1, commit_through=step)
    await feed(run)
    assert await granted(run) == 2


async def test_gaps_between_versions_do_not_widen_it(run: Run) -> None:
    await run.create(max_lookahead=1)
    await run.publish(1_000)
    await feed(run)
    assert await granted(run) == 4


async def test_an_open_step_of_its_own_size_gets_all_its_groups(run: Run) -> None:
    await run.create(batch_groups=4, micro_batch_groups=2, max_queued_groups=8, max_lookahead=1)
    await feed(run)
    await run.push(*map(run.group, (await run.lease(2)).grants))
    assert not (await run.batch(0, batch_groups=8)).final
    later = (await run.lease(50)).grants
    assert len(later) == 2 * 8 - 2, "the open step, and another as large"
    await run.push(*map(run.group, later[:6]))
    assert [(await run.batch(0, micro_batch)).final for micro_batch in (1, 2, 3)] == [False, False, True]


@pytest.mark.parametrize(
    ("policy", "most"),
    [
        ({"max_lookahead": 0}, 2),
        ({"max_lookahead": 1, "prefetch_batches": 1}, 2),
        ({"max_lookahead": 1, "batches_per_publish": 2}, 6),
        ({"quota_groups": 7}, 3),
        ({"micro_batch_groups": 1, "max_queued_tokens": 100, "quota_tokens": 400}, 2),
    ],
    ids=str,
)
async def test_a_pull_asks_for_no_more_groups_than_may_exist(run: Run, policy: dict[str, int], most: int) -> None:
    await run.create(**{"batch_groups": 2, "max_queued_groups": 9, **policy})
    with pytest.raises(InvalidField) as refused:
        await run.pull(0, batch_groups=most + 1)
    assert refused.value.attributes == {"field": "batch_groups", "value": str(most + 1), "limit": f"1 to {most}"}
    assert isinstance(await run.pull(0, batch_groups=most), ops.Short)


async def test_more_ranks_than_groups_of_a_batch_are_refused(run: Run) -> None:
    await run.create(batch_groups=2, batch_tokens=100, equal_shards=True)
    with pytest.raises(InvalidField) as refused:
        await run.pull(0, world_size=3)
    assert refused.value.attributes["limit"] == "at most batch_groups 2 (equal_shards)"


async def test_a_publish_that_says_nothing_of_commits_covers_what_cannot_be_prefetched(run: Run) -> None:
    await run.create(max_staleness=0)
    await run.fill("a", "b")
    await run.batch(0)
    await run.publish(1)
    await run.commit(0)
    await feed(run)
    newest = await run.lease(2, loaded=weights(1))
    assert len(newest.grants) == 2, "no engine can have more than the published version"


async def test_a_publish_that_says_nothing_of_commits_leaves_out_what_may_be_prefetched(run: Run) -> None:
    await run.create(max_lookahead=1, prefetch_batches=1, max_queued_groups=4)
    await run.fill("a", "b", "c", "d")
    await run.batch(0)
    await run.batch(1)
    await run.publish(1)
    await feed(run)
    assert await granted(run) == 2, "(1 + 1 - the one that may be prefetched) * 2"


PACED: dict[str, Any] = {
    "max_lookahead": 1,
    "max_staleness": 1,
    "max_queued_groups": 4,
    "overflow_action": OverflowAction.BLOCK,
}


async def after_a_publish(run: Run, queued: int) -> None:
    """Step 0 is trained and version 1 published; that many groups of version 0 are queued, and tasks are pending."""
    await run.create(**PACED)
    await run.fill("a", "b")
    await run.batch(0)
    await run.publish(1, commit_through=0)
    await run.fill(*(f"queued-{i}" for i in range(queued)))
    await feed(run)


@pytest.mark.parametrize(("queued", "behind", "current"), [(0, 2, 4), (1, 1, 3), (2, 0, 2), (3, 0, 1)])
async def test_an_engine_that_is_behind_gets_what_is_fresh_at_its_turn(
    run: Run, queued: int, behind: int, current: int
) -> None:
    await after_a_publish(run, queued)
    late = await run.lease(50, loaded=weights(0))
    assert (len(late.grants), late.wait, late.required_version) == (behind, ops.LeaseWait.ENGINE_STALE, 1)
    prompt = await run.lease(50, loaded=weights(1))
    assert (len(prompt.grants), prompt.wait) == (current - behind, ops.LeaseWait.AT_CAPACITY)
    assert (await run.lease(50, loaded=weights(0))).wait is ops.LeaseWait.AT_CAPACITY


async def test_the_lag_of_an_engine_is_no_reason_while_nothing_can_be_leased(run: Run) -> None:
    await run.create(**PACED)
    await run.publish(1)
    await run.fill("a", "b")
    assert (await run.lease(loaded=weights(0))).wait is ops.LeaseWait.NO_TASKS
    await run.submit("failing")
    grant = (await run.lease(loaded=weights(1))).grants[0]
    await run.give_back(grant, kind=ops.ReturnKind.FAILED, error="why")
    assert (await run.lease(loaded=weights(0))).wait is ops.LeaseWait.BACKING_OFF
    await run.pass_ms(60_000)
    assert (await run.lease(loaded=weights(0))).wait is ops.LeaseWait.ENGINE_STALE


async def test_weights_of_an_abandoned_term_are_behind_as_far_as_their_fork(run: Run) -> None:
    await after_a_publish(run, 2)
    await run.resume(0, ops.ResumeMode.DISCARD)
    await run.publish(1)
    stale = await run.lease(50, loaded=weights(1, term=1))
    assert (stale.grants, stale.wait, stale.required_version) == ([], ops.LeaseWait.ENGINE_STALE, 1)
    assert len((await run.lease(50, loaded=weights(1, term=2))).grants) == 2
