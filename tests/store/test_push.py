"""Pushing groups: identity, caps, overflow, blocked pushes."""

import asyncio
import re
from typing import Any

import pytest

from buffer_service import commands
from buffer_service.commands.replies import text
from buffer_service.domain import ops
from buffer_service.domain.command import Command
from buffer_service.domain.policy import OverflowAction, RunPolicy
from buffer_service.store.keys import index_key
from buffer_wire.payloads.keys import new_nonce, payload_key
from tests.store.driver import Run, weights

BLOCK, REJECT, DROP = OverflowAction.BLOCK, OverflowAction.REJECT, OverflowAction.DROP_OLDEST


async def test_a_pushed_group_is_queued_and_its_task_completed(run: Run) -> None:
    await run.create()
    await run.submit("a")
    lease = await run.one_lease()
    (pushed,) = await run.push(run.group(lease))
    assert (pushed.kind, pushed.group_id, pushed.payload_key) == (ops.PushKind.QUEUED, "a/0", "")
    assert await run.tasks() == {"submitted": 1, "completed": 1}
    assert (await run.view()).groups["queued"] == ops.Amount(1, 4, 10, 4)
    await run.check()


async def test_a_repeated_push_is_a_duplicate_and_its_payload_goes(run: Run) -> None:
    await run.create()
    await run.submit("a")
    lease = await run.one_lease()
    kinds = await run.push_kinds(run.group(lease), run.group(lease))
    assert kinds + await run.push_kinds(run.group(lease)) == ["queued", "duplicate", "duplicate"]
    assert (await run.view()).statistics["pushes_duplicate"] == 2
    assert await run.ledger() == {"accepted": 1, "queued": 1}
    await run.check()
    assert len(await run.payload_keys()) == 1


async def test_the_first_valid_result_wins_whichever_attempt_made_it(run: Run) -> None:
    await run.create()
    await run.submit("a")
    first = await run.one_lease()
    await run.give_back(first)
    second = await run.one_lease(worker="other")
    assert await run.push_kinds(run.group(first)) == ["queued"]
    assert await run.push_kinds(run.group(second)) == ["closed"]
    assert await run.push_kinds(run.group(first)) == ["duplicate"]
    assert await run.give_back(second, worker="other") == ["lost"]
    assert await run.tasks() == {"submitted": 1, "completed": 1}
    await run.check()


async def test_a_pending_task_takes_a_late_result(run: Run) -> None:
    await run.create(lease_ttl_ms=1000, retry_backoff_ms=60_000)
    await run.submit("a", "b")
    a, b = (await run.lease(2)).grants
    await run.give_back(a)
    await run.pass_ms(1001)
    await run.store.sweep()
    assert await run.push_kinds(run.group(a), run.group(b)) == ["queued", "queued"]
    assert (await run.lease()).wait is ops.LeaseWait.NO_TASKS
    assert await run.tasks() == {"submitted": 2, "completed": 2}


async def test_leases_that_never_were_are_unknown(run: Run) -> None:
    await run.create()
    await run.submit("a")
    lease = await run.one_lease()
    never = [
        run.group(lease, lease_id="a/0/2"),
        run.group(lease, incarnation=1, lease_id="a/1/1"),
        run.group(lease, lease_id="x/0/1", incarnation=0),
        run.group(ops.LeaseGrant("x/0/1", "x", 0, 1, b"", b"")),
    ]
    before = (await run.view()).revision
    outcomes = await run.push(*never)
    assert [o.kind.value for o in outcomes] == ["unknown_lease", "unknown_lease", "invalid", "unknown_lease"]
    assert outcomes[2].field == "lease_id"
    assert (await run.view()).revision == before
    await run.check()
    assert await run.payload_keys() == set()


@pytest.mark.parametrize(
    "lease_id", ["a", "a/0", "a/0/x", "a/0/0", "a/0/01", "a/00/1", "a//1", "/0/1", "a/0/1/1", "b/0/1"]
)
async def test_malformed_lease_ids_are_invalid(run: Run, lease_id: str) -> None:
    await run.create()
    await run.submit("a")
    lease = await run.one_lease()
    (outcome,) = await run.push(run.group(lease, lease_id=lease_id))
    assert (outcome.kind, outcome.field, outcome.value) == (ops.PushKind.INVALID, "lease_id", lease_id)


async def test_a_failed_task_is_closed(run: Run) -> None:
    await run.create(max_attempts=1)
    await run.submit("a")
    lease = await run.one_lease()
    await run.give_back(lease, kind=ops.ReturnKind.FAILED)
    assert await run.push_kinds(run.group(lease), run.group("a")) == ["closed", "closed"]
    assert (await run.view()).statistics["pushes_closed"] == 2


async def test_a_push_without_a_lease_makes_a_task_of_its_own(run: Run) -> None:
    await run.create()
    kinds = await run.push_kinds(run.group("free"), run.group("free"), run.group("other", incarnation=1))
    assert kinds == ["queued", "duplicate", "invalid"]
    assert await run.tasks() == {"submitted": 1, "completed": 1}


async def test_a_push_without_a_lease_may_complete_an_open_task(run: Run) -> None:
    await run.create()
    await run.submit("a", "b")
    lease = await run.one_lease()
    kinds = await run.push_kinds(run.group("a"), run.group("b", incarnation=1), run.group("b"), run.group("a"))
    assert kinds == ["queued", "closed", "queued", "duplicate"]
    assert await run.push_kinds(run.group(lease)) == ["closed"]


async def test_what_is_above_a_cap_on_its_own_is_invalid_whatever_the_queue(run: Run) -> None:
    await run.create(max_queued_bytes=1 << 20, max_queued_tokens=100)
    outcomes = await run.push(
        run.group("a", size=(1 << 20) + 1), run.group("b", tokens=101), run.group("c", tokens=100)
    )
    assert [(o.kind.value, o.field) for o in outcomes] == [
        ("invalid", "payload"),
        ("invalid", "tokens"),
        ("queued", ""),
    ]
    assert (outcomes[0].value, outcomes[0].limit) == ("1048577", "at most 1048576 bytes")
    await run.check()


async def test_drop_oldest_drops_until_the_new_group_fits(run: Run) -> None:
    await run.create(max_queued_groups=3, max_queued_tokens=100, overflow_action=DROP)
    await run.fill("a", "b", "c", tokens=30)
    await run.fill("d", tokens=30)
    assert await run.queue() == ["b/0", "c/0", "d/0"]
    await run.fill("e", tokens=70)
    assert await run.queue() == ["d/0", "e/0"]
    assert await run.ledger() == {"accepted": 5, "queued": 2, "dropped_overflow": 3}
    await run.check()
    assert len(await run.payload_keys()) == 2


async def test_a_bundle_larger_than_the_queue_keeps_its_newest(run: Run) -> None:
    await run.create(max_queued_groups=2, overflow_action=DROP)
    assert await run.push_kinds(*(run.group(name) for name in "abcde")) == ["queued"] * 5
    assert await run.queue() == ["d/0", "e/0"]
    await run.check()


async def test_reject_leaves_the_task_as_it_is(run: Run) -> None:
    await run.create(overflow_action=REJECT)
    await run.fill("x", "y")
    await run.submit("a")
    lease = await run.one_lease()
    assert await run.push_kinds(run.group(lease), run.group("z")) == ["rejected_full", "rejected_full"]
    assert (await run.view()).statistics["pushes_rejected"] == 2
    assert (await run.tasks())["leased"] == 1
    await run.batch(0)
    assert await run.push_kinds(run.group(lease)) == ["queued"]
    await run.check()


async def test_a_blocked_push_keeps_its_payload_and_its_lease(run: Run) -> None:
    await run.create(overflow_action=BLOCK, lease_ttl_ms=1000)
    await run.fill("x", "y")
    await run.submit("a", "b")
    a, b = (await run.lease(2)).grants
    await run.pass_ms(900)
    groups = [run.group(a, b"body-a"), run.group("x"), run.group(b, b"body-b")]
    first, duplicate, second = await run.push(*groups)
    assert [o.kind.value for o in (first, duplicate, second)] == ["blocked", "duplicate", "blocked"]
    await run.pass_ms(900)
    waiting = [(groups[0].facts, first.payload_key), (groups[2].facts, second.payload_key)]
    again = await run.store.retry_push(run.run_id, waiting)
    assert [(o.kind.value, o.payload_key) for o in again.outcomes] == [
        ("blocked", first.payload_key),
        ("blocked", second.payload_key),
    ]
    await run.pass_ms(900)
    await run.store.sweep()
    assert (await run.tasks())["leased"] == 2
    await run.batch(0)
    done = await run.store.retry_push(run.run_id, waiting)
    assert [o.kind.value for o in done.outcomes] == ["queued", "queued"]
    assert await run.bodies(await run.batch(1)) == [b"body-a", b"body-b"]
    await run.check()


async def test_after_a_blocked_group_no_later_one_overtakes_it(run: Run) -> None:
    await run.create(overflow_action=BLOCK, max_queued_groups=3, max_queued_tokens=100)
    await run.fill("x", tokens=60)
    assert await run.push_kinds(run.group("big", tokens=50), run.group("small", tokens=1)) == ["blocked", "blocked"]


async def test_an_abandoned_push_leaves_nothing_behind(run: Run) -> None:
    await run.create(overflow_action=BLOCK)
    await run.fill("x", "y")
    (blocked,) = await run.push(run.group("z"))
    await run.store.call(commands.abandon_push(run.run_id, [blocked.payload_key]))
    await run.check()
    assert len(await run.payload_keys()) == 2
    assert await run.members("staging") == []


async def test_a_retry_whose_first_reply_got_lost_keeps_the_payload(run: Run) -> None:
    await run.create(overflow_action=BLOCK)
    await run.fill("x", "y")
    group = run.group("z", b"precious")
    (blocked,) = await run.push(group)
    await run.batch(0)
    waiting = [(group.facts, blocked.payload_key)]
    for _ in range(2):
        result = await run.store.retry_push(run.run_id, waiting)
        assert [o.kind.value for o in result.outcomes] == ["queued"]
    await run.store.call(commands.abandon_push(run.run_id, [blocked.payload_key]))
    await run.check()
    await run.fill("w")
    assert await run.bodies(await run.batch(1)) == [b"precious", b"body-w"]


async def test_a_blocked_payload_that_nobody_retries_is_given_up(run: Run) -> None:
    await run.create(overflow_action=BLOCK)
    await run.fill("x", "y")
    group = run.group("z")
    (blocked,) = await run.push(group)
    waiting = [(group.facts, blocked.payload_key)]
    await run.pass_ms(599_999)
    await run.store.sweep()
    assert blocked.payload_key in await run.payload_keys()
    await run.store.retry_push(run.run_id, waiting)
    await run.pass_ms(600_000)
    await run.store.sweep()
    assert blocked.payload_key not in await run.payload_keys()
    await run.batch(0)
    result = await run.store.retry_push(run.run_id, waiting)
    # No verdict on the group: its push has to come again, with the body.
    assert [o.kind.value for o in result.outcomes] == ["gone"]
    assert await run.push_kinds(group) == ["queued"]
    await run.check()


async def test_what_a_dead_replica_staged_is_given_up_by_the_runs_clock_whatever_the_replicas_was(run: Run) -> None:
    await run.create()
    staging = index_key(run.run_id, "staging")
    key = payload_key(run.run_id, new_nonce(), 0, 4)
    # As store_and_run leaves it where the script behind it fails.
    await run.command("ZADD", staging, 0, key)
    await run.command("SET", key, b"body")
    for passed in (0, 599_999):
        await run.pass_ms(passed)
        await run.store.sweep()
        assert key in await run.payload_keys()
    await run.pass_ms(1)
    await run.check()
    assert await run.payload_keys() == set()


async def test_replicas_that_push_at_once_accept_one_result_for_each_task(run: Run) -> None:
    await run.create(max_queued_groups=100)
    await run.submit(*(f"t{i}" for i in range(40)))
    grants = (await run.lease(40)).grants
    results = await asyncio.gather(
        *(run.store.push(run.run_id, [run.group(grant, b"%d" % replica) for grant in grants]) for replica in range(4))
    )
    outcomes = sorted(outcome.kind.value for result in results for outcome in result.outcomes)
    assert outcomes == ["duplicate"] * 120 + ["queued"] * 40
    await run.check()
    assert len(await run.payload_keys()) == 40


async def test_nothing_stays_staged(run: Run) -> None:
    await run.create(overflow_action=REJECT)
    await run.push_kinds(run.group("a"), run.group("b"), run.group("c"), run.group("a"), run.group("d", incarnation=3))
    assert await run.command("EXISTS", index_key(run.run_id, "staging")) == 0


async def test_heads_of_an_abandoned_timeline_count_as_its_fork(run: Run) -> None:
    await run.create(batch_groups=1, max_queued_groups=4)
    await run.publish(5)
    await run.resume(0)
    await run.fill("a", head=weights(5, term=1), tail=weights(7, term=2))
    batch = await run.batch(0)
    assert [(g.head_version, g.tail_version) for g in batch.shard] == [(5, 7)]
    await run.publish(9)
    await run.publish(10, commit_through=0)
    await run.resume(0)
    await run.fill("b", head=weights(10, term=2), tail=weights(12, term=3))
    assert [(g.head_version, g.tail_version) for g in (await run.batch(1)).shard] == [(9, 12)]


async def test_a_live_policy_change_applies_to_the_next_push(run: Run) -> None:
    await run.create(overflow_action=REJECT)
    await run.fill("a", "b")
    assert await run.push_kinds(run.group("c")) == ["rejected_full"]
    await run.store.call(
        commands.update_policy(run.run_id, RunPolicy(batch_groups=2, max_queued_groups=3, overflow_action=REJECT))
    )
    assert await run.push_kinds(run.group("c")) == ["queued"]


async def test_what_must_be_dropped_for_a_group_is_dropped_in_portions_within_one_push(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.create(batch_groups=1, max_queued_groups=1_000, overflow_action=DROP)
    for first in range(0, 1_000, 250):
        await run.push(*(run.group(f"t{index}") for index in range(first, first + 250)))
    revision = await run.store.call(commands.update_policy(run.run_id, RunPolicy(batch_groups=1, max_queued_groups=2)))
    await run.command("CONFIG", "RESETSTAT")
    call, between = run.store._calls.call, []

    async def observed(command: Command[Any]) -> Any:
        if command.script == "push" and not command.payloads:
            between.append((await run.view()).revision)
        return await call(command)

    monkeypatch.setattr(run.store._calls, "call", observed)
    pushed = await run.store.push(run.run_id, [run.group("a"), run.group("t999"), run.group("b"), run.group("c")])
    monkeypatch.undo()
    # Only the last call of a push is acknowledged: a store that has lost it must be behind.
    assert between == [revision] * 7
    stats = text(await run.command("INFO", "commandstats"))
    assert [outcome.kind.value for outcome in pushed.outcomes] == ["queued", "duplicate", "queued", "queued"]
    assert pushed.revision == revision + 1
    assert await run.queue() == ["b/0", "c/0"]
    assert await run.ledger() == {"accepted": 1_003, "queued": 2, "dropped_overflow": 1_001}
    # 1,001 groups by at most 128 a call, and a view between any two.
    assert re.search(r"cmdstat_evalsha:calls=(\d+)", stats)[1] == "15"  # type: ignore[index]
    await run.check()
