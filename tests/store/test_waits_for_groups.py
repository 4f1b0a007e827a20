"""The stale action wait: a batch waits for groups in flight that would be too stale for the next one."""

from typing import Any

import pytest

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.policy import OverflowAction, RunPolicy, StaleAction
from buffer_service.domain.ports import Topic
from buffer_wire.errors import InvalidPolicy
from tests.store.driver import Run

WAIT_MS = 5_000
WAITS: dict[str, Any] = {
    "batch_groups": 2,
    "max_staleness": 1,
    "max_lookahead": 1,
    "max_queued_groups": 4,
    "stale_action": StaleAction.WAIT,
    "stale_wait_ms": WAIT_MS,
    "lease_ttl_ms": 60_000,
}


async def begin(run: Run, **policy: Any) -> ops.LeaseGrant:
    """A run whose next batch is complete, while a group is in flight that only this batch may train."""
    await run.create(**WAITS | policy)
    await run.submit("late")
    late = await run.one_lease()
    await run.publish(1)
    await run.fill("new0", "new1", head=1)
    return late


def names(batch: ops.Batch) -> list[str]:
    return [group.group_id for group in batch.shard]


async def test_a_complete_batch_waits_for_a_group_that_would_be_too_stale_for_the_next_one_and_takes_it_first(
    run: Run,
) -> None:
    late = await begin(run)
    short = await run.short(0)
    assert (short.queued, short.needed, short.awaited) == (2, 2, 1)
    assert "1 group in flight" in short.blocked_hint
    await run.push(run.group(late))
    assert names(await run.batch(0)) == ["new0/0", "late/0"]
    await run.check()


async def test_it_does_not_wait_for_a_group_that_the_next_batch_may_train_as_well(run: Run) -> None:
    await begin(run, max_staleness=2)
    assert names(await run.batch(0)) == ["new0/0", "new1/0"]


async def test_of_what_is_queued_the_batch_takes_first_what_the_next_one_may_not_train(run: Run) -> None:
    await run.create(**WAITS)
    await run.fill("new0", "new1", head=1)
    await run.fill("old", head=0)
    await run.publish(1)
    assert names(await run.batch(0)) == ["new0/0", "old/0"]


async def test_it_waits_no_longer_than_the_policy_says_and_what_comes_later_is_started_anew(run: Run) -> None:
    late = await begin(run)
    await run.short(0)
    await run.pass_ms(WAIT_MS - 1)
    await run.short(0)
    await run.pass_ms(1)
    assert names(await run.batch(0)) == ["new0/0", "new1/0"]
    await run.push(run.group(late))
    await run.fill("a", "b", head=2)
    await run.publish(2, commit_through=0)
    assert names(await run.batch(1)) == ["a/0", "b/0"]
    assert (await run.ledger())["recycled"] == 1
    await run.check()


@pytest.mark.parametrize("action", [OverflowAction.BLOCK, OverflowAction.REJECT])
async def test_it_does_not_wait_for_a_group_that_waits_for_the_room_that_it_makes(
    run: Run, action: OverflowAction
) -> None:
    late = await begin(run, overflow_action=action, quota_groups=6)
    assert (await run.short(0)).awaited == 1
    # Pushed without leases, or late, and so beyond what is admitted.
    await run.fill("new2", head=1)
    assert (await run.short(0)).awaited == 1
    ticket = run.store.notifications.ticket(run.run_id, Topic.GROUPS)
    await run.fill("new3", head=1)
    refused = await run.push_kinds(run.group(late))
    assert refused == [{OverflowAction.BLOCK: "blocked", OverflowAction.REJECT: "rejected_full"}[action]]
    assert await run.store.notifications.wait(run.run_id, Topic.GROUPS, ticket, 5.0) > ticket
    assert names(await run.batch(0)) == ["new0/0", "new1/0"]
    await run.check()


async def test_it_waits_for_none_that_is_larger_than_the_room_once_that_was_refused_until_the_next_batch(
    run: Run,
) -> None:
    late = await begin(run, overflow_action=OverflowAction.REJECT, max_queued_tokens=30)
    assert (await run.short(0)).awaited == 1
    large = run.group(late, tokens=11)
    ticket = run.store.notifications.ticket(run.run_id, Topic.GROUPS)
    assert await run.push_kinds(large) == ["rejected_full"]
    assert await run.store.notifications.wait(run.run_id, Topic.GROUPS, ticket, 5.0) > ticket
    assert names(await run.batch(0)) == ["new0/0", "new1/0"]
    await run.fill("new2", "new3", head=1)
    assert (await run.short(1)).awaited == 1
    await run.check()


async def test_a_refused_push_without_a_lease_ends_no_wait(run: Run) -> None:
    await begin(run, overflow_action=OverflowAction.REJECT, max_queued_tokens=30)
    assert await run.push_kinds(run.group("own", head=1, tokens=11)) == ["rejected_full"]
    assert (await run.short(0)).awaited == 1


async def test_it_waits_with_a_full_queue_where_a_group_that_ends_drops_another(run: Run) -> None:
    late = await begin(run, overflow_action=OverflowAction.DROP_OLDEST)
    await run.fill("new2", "new3", head=1)
    assert (await run.short(0)).awaited == 1
    assert await run.push_kinds(run.group(late)) == ["queued"]
    assert names(await run.batch(0)) == ["new1/0", "late/0"]


@pytest.mark.parametrize("kind", [ops.ReturnKind.INTERRUPTED, ops.ReturnKind.FAILED])
async def test_a_lease_that_comes_back_ends_the_wait_and_says_so_to_pulls(run: Run, kind: ops.ReturnKind) -> None:
    late = await begin(run)
    await run.short(0)
    ticket = run.store.notifications.ticket(run.run_id, Topic.GROUPS)
    await run.give_back(late, kind=kind)
    assert await run.store.notifications.wait(run.run_id, Topic.GROUPS, ticket, 5.0) > ticket
    assert names(await run.batch(0)) == ["new0/0", "new1/0"]


async def test_micro_batches_wait_only_before_the_last_of_their_step(run: Run) -> None:
    late = await begin(run, micro_batch_groups=1)
    assert names(await run.batch(0, 0)) == ["new0/0"]
    assert (await run.short(0, 1)).awaited == 1
    await run.push(run.group(late))
    assert names(await run.batch(0, 1)) == ["late/0"]


async def test_what_was_in_flight_at_a_resume_or_before_the_policy_waited_is_not_waited_for(run: Run) -> None:
    await begin(run)
    await run.resume()
    assert isinstance(await run.pull(0), ops.Batch)


async def test_another_action_ends_the_wait(run: Run) -> None:
    await begin(run)
    await run.short(0)
    policy = RunPolicy(**WAITS | {"stale_action": StaleAction.DROP})
    await run.store.call(commands.update_policy(run.run_id, policy))
    assert names(await run.batch(0)) == ["new0/0", "new1/0"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_staleness": -1}, "stale_action"),
        ({"staleness_measure": "mean"}, "stale_action"),
        ({"max_lookahead": -1}, "stale_action"),
        ({"max_lookahead": 2}, "stale_action"),
        ({"max_queued_groups": 3}, "max_queued_groups"),
        ({"batch_tokens": 100}, "stale_action"),
    ],
)
def test_a_policy_that_could_wait_in_vain_is_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidPolicy) as refused:
        RunPolicy(**WAITS | change)
    assert refused.value.attributes["field"] == field
