"""Partial rollouts and leases whose group could not be fresh any more."""

from buffer_service import commands
from buffer_service.domain import ops
from tests.store.driver import Run, weights

LIVE, LOST, CANCELLED = ops.LeaseState.LIVE, ops.LeaseState.LOST, ops.LeaseState.CANCELLED


async def test_a_partial_rollout_that_became_too_stale_is_given_up(run: Run) -> None:
    await run.create(max_staleness=1)
    await run.submit("a")
    lease = await run.one_lease()
    await run.give_back(lease, partial_rollout=b"old", head=weights(0), tokens=5)
    await run.publish(2)
    again = await run.one_lease(loaded=weights(2))
    assert (again.partial_rollout, again.incarnation) == (b"", 0)
    assert (await run.view()).statistics["partial_rollout_tokens_discarded"] == 5
    await run.check()
    assert await run.payload_keys() == set()


async def test_a_partial_rollout_too_far_from_the_loaded_weights_is_given_up(run: Run) -> None:
    await run.create(max_version_spread=1)
    await run.submit("far", "near", "headless")
    far, near, headless = (await run.lease(3)).grants
    await run.give_back(far, partial_rollout=b"far", head=weights(0), tokens=5)
    await run.give_back(near, partial_rollout=b"near", head=weights(1), tokens=6)
    await run.give_back(headless, partial_rollout=b"headless")
    leased = await run.lease(3, loaded=weights(2))
    assert [grant.partial_rollout for grant in leased.grants] == [b"", b"near", b"headless"]
    statistics = (await run.view()).statistics
    assert (statistics["partial_rollouts_beyond_spread"], statistics["partial_rollout_tokens_discarded"]) == (1, 5)
    await run.check()


async def test_what_is_too_stale_does_not_count_as_beyond_the_spread(run: Run) -> None:
    await run.create(max_version_spread=0, max_staleness=1)
    await run.submit("a")
    await run.give_back(await run.one_lease(), partial_rollout=b"old", head=weights(0), tokens=5)
    await run.publish(2)
    assert (await run.one_lease(loaded=weights(2))).partial_rollout == b""
    statistics = (await run.view()).statistics
    assert (statistics["partial_rollouts_beyond_spread"], statistics["partial_rollout_tokens_discarded"]) == (0, 5)


async def test_a_heartbeat_takes_back_a_lease_whose_group_could_not_be_fresh(run: Run) -> None:
    await run.create(max_staleness=1, cancel_stale_leases=True)
    await run.submit("old", "new")
    old = await run.one_lease(loaded=weights(0))
    await run.publish(1)
    new = await run.one_lease(loaded=weights(1))
    both = [old.lease_id, new.lease_id]
    assert (await run.store.call(commands.extend(run.run_id, "w", "i", both))).states == [LIVE, LIVE]
    await run.publish(2)
    assert (await run.store.call(commands.extend(run.run_id, "w", "i", both))).states == [CANCELLED, LIVE]
    assert (await run.store.call(commands.extend(run.run_id, "w", "i", both))).states == [LOST, LIVE]
    assert (await run.view()).statistics["leases_cancelled"] == 1
    again = await run.one_lease(loaded=weights(2))
    assert again.lease_id == "old/0/2"
    await run.check()


async def test_the_head_of_a_partial_rollout_cancels_too_and_it_is_given_up(run: Run) -> None:
    await run.create(max_staleness=2, cancel_stale_leases=True)
    await run.submit("a")
    await run.give_back(await run.one_lease(), partial_rollout=b"half", head=weights(0), tokens=7)
    await run.publish(2)
    lease = await run.one_lease(loaded=weights(2))
    assert lease.partial_rollout == b"half"
    await run.publish(3)
    assert (await run.store.call(commands.extend(run.run_id, "w", "i", [lease.lease_id]))).states == [CANCELLED]
    assert (await run.view()).statistics["partial_rollout_tokens_discarded"] == 7
    assert (await run.one_lease(loaded=weights(3))).partial_rollout == b""
    await run.check()
    assert await run.payload_keys() == set()


async def test_a_resume_brings_the_heads_of_leases_into_the_new_timeline(run: Run) -> None:
    await run.create(batch_groups=1, max_staleness=1, cancel_stale_leases=True)
    await run.submit("a")
    await run.publish(1)
    await run.fill("b", head=1)
    await run.batch(0)
    await run.publish(5, commit_through=0)
    lease = await run.one_lease(loaded=weights(5))
    await run.resume(0)
    assert (await run.store.call(commands.extend(run.run_id, "w", "i", [lease.lease_id]))).states == [LIVE]
    # Trained on step 0, by a publish that says nothing else: step 1 is expected to be trained by version 3.
    await run.publish(3)
    assert (await run.store.call(commands.extend(run.run_id, "w", "i", [lease.lease_id]))).states == [CANCELLED]
