"""Stages: groups that wait for columns, the leases of their workers, and what becomes of groups meanwhile."""

import struct
from dataclasses import replace
from typing import Any

import pytest

from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.policy import OverflowAction
from buffer_service.domain.ports import Topic
from buffer_wire.errors import RunPaused, StoreRolledBack
from tests.store.driver import Run, claim
from tests.store.test_filter import recorded

MIB = 1 << 20
REF, VALUES, REWARDS = "reference", "values", "rewards"


async def ask(
    run: Run, stage: str, count: int = 8, *, worker: str = "s", instance: str = "i", request_id: str = ""
) -> ops.StageLeased:
    request = request_id or f"stage-{next(run._ids)}"
    return await run.store.call(
        commands.lease_groups(run.run_id, ops.StageAsk(stage, worker, instance, request, count), seen_revision=claim(0))
    )


async def leased(run: Run, stage: str, count: int = 8, **kwargs: Any) -> list[ops.StageLease]:
    return list((await ask(run, stage, count, **kwargs)).leases)


def columns(run: Run, lease: ops.StageLease, body: bytes = b"columns", **kwargs: Any) -> ops.NewGroup:
    """Columns that a stage pushes for a lease of a group that `Run.fill` has pushed."""
    task_id, incarnation, _ = lease.lease_id.split("/")
    return run.group(task_id, body, incarnation=int(incarnation), lease_id=lease.lease_id, **kwargs)


async def add(run: Run, stage: str, *names: str, **kwargs: Any) -> list[str]:
    """Have a stage add columns to groups, by name, and to all where none is named."""
    kinds = []
    for lease in await leased(run, stage):
        if not names or lease.group_id in names:
            kinds += await run.push_kinds(columns(run, lease, f"{stage}-{lease.group_id}".encode(), **kwargs))
    return kinds


async def states(run: Run) -> dict[str, tuple[int, int, int, int]]:
    return {one.name: (one.waiting, one.leased, one.added, one.failed) for one in (await run.view()).stages}


async def sizes(run: Run) -> dict[str, int]:
    """Bytes of groups by state, without those that have none."""
    return {state: amount.bytes for state, amount in (await run.view()).groups.items() if amount.bytes}


async def test_batches_take_groups_that_have_passed_all_stages_in_order(run: Run) -> None:
    await run.create(stages=(REF, VALUES), max_queued_groups=8)
    await run.fill("a", "b", "c")
    assert await states(run) == {REF: (3, 0, 0, 0), VALUES: (0, 0, 0, 0)}
    assert (await run.short(0)).queued == 0
    assert await leased(run, VALUES) == []
    assert await add(run, REF) == ["added"] * 3
    first, *_ = await leased(run, VALUES, 1)
    assert [(one.stage, one.payload_key) for one in first.added] == [(REF, first.added[0].payload_key)]
    assert await run.store.fetch(run.run_id, [first.payload_key, first.added[0].payload_key]) == [
        b"body-a",
        b"reference-a/0",
    ]
    assert (await run.short(0)).queued == 0
    assert await run.push_kinds(columns(run, first)) == ["added"]
    assert await add(run, VALUES, "b/0") == ["added"]
    batch = await run.batch(0)
    assert [group.group_id for group in batch.shard] == ["a/0", "b/0"]
    assert [[added.stage for added in group.added] for group in batch.shard] == [[REF, VALUES]] * 2
    assert await run.ledger() == {"accepted": 3, "queued": 1, "delivered": 2}
    await run.check()


async def test_a_repeated_write_is_answered_like_the_first_and_a_lost_one_is_refused(run: Run) -> None:
    await run.create(stages=(REF,), lease_ttl_ms=1000)
    await run.fill("a")
    (lost,) = await leased(run, REF)
    await run.pass_ms(1001)
    (lease,) = await leased(run, REF)
    assert lease.lease_id != lost.lease_id
    assert await run.push_kinds(columns(run, lost)) == ["closed"]
    written = await run.write(columns(run, lease))
    assert await run.push_kinds(written) == ["added"]
    assert await run.push_kinds(written) == ["added"]
    assert await run.push_kinds(columns(run, lease)) == ["duplicate"]
    assert await run.push_kinds(columns(run, lost)) == ["closed"]
    assert (await states(run))[REF] == (0, 0, 1, 1)
    await run.check()


async def test_what_does_not_belong_to_the_lease_is_refused(run: Run) -> None:
    await run.create(stages=(REF,))
    await run.fill("a", "b")
    a, b = await leased(run, REF)
    (samples,) = await run.push(columns(run, a, samples=5))
    (tokens,) = await run.push(columns(run, a, tokens=11))
    (other,) = await run.push(run.group("b", lease_id=a.lease_id))
    assert [(one.kind.value, one.field) for one in (samples, tokens, other)] == [
        ("invalid", "samples"),
        ("invalid", "tokens"),
        ("invalid", "lease_id"),
    ]
    forged = replace(b, lease_id=b.lease_id.replace(":2", ":3"))
    assert await run.push_kinds(columns(run, forged)) == ["unknown_lease"]
    assert await run.push_kinds(columns(run, replace(b, lease_id=b.lease_id.replace("b/0", "z/0")))) == ["closed"]
    assert (await states(run))[REF] == (0, 2, 0, 0)
    await run.check()


async def test_leases_are_prolonged_returned_and_released_by_a_new_process(run: Run) -> None:
    await run.create(stages=(REF,), lease_ttl_ms=1000)
    await run.fill("a", "b")
    a, b = await leased(run, REF, request_id="r")
    assert [one.lease_id for one in await leased(run, REF, request_id="r")] == [a.lease_id, b.lease_id]
    await run.pass_ms(800)
    extended = await run.store.call(commands.extend(run.run_id, "s", "i", [a.lease_id, "a/0/reference:9"]))
    assert [state.value for state in extended.states] == ["live", "lost"]
    await run.pass_ms(800)
    await run.store.sweep()
    assert (await states(run))[REF] == (1, 1, 0, 1)
    given = [ops.LeaseReturn(a.lease_id, ops.ReturnKind.INTERRUPTED, "", b"", None, 0)]
    assert [o.value for o in (await run.store.call(commands.give_back(run.run_id, "s", "i", given))).outcomes] == [
        "pending"
    ]
    assert len(await leased(run, REF)) == 2
    assert await leased(run, REF, worker="other") == []
    assert len(await leased(run, REF, instance="new")) == 2
    assert (await states(run))[REF] == (0, 2, 0, 1)
    await run.check()


async def test_a_group_on_which_a_stage_fails_too_often_is_discarded(run: Run) -> None:
    await run.create(stages=(REF,), max_attempts=2)
    await run.fill("a", "b")
    for outcome in ("pending", "failed"):
        a, _ = await leased(run, REF, instance=outcome)
        given = [ops.LeaseReturn(a.lease_id, ops.ReturnKind.FAILED, "no", b"", None, 0)]
        back = await run.store.call(commands.give_back(run.run_id, "s", outcome, given))
        assert [one.value for one in back.outcomes] == [outcome]
    assert await run.ledger() == {"accepted": 2, "queued": 1, "discarded": 1}
    await run.check()


async def test_groups_in_stages_take_room_are_dropped_and_too_stale_like_queued_ones(run: Run) -> None:
    await run.create(
        stages=(REF,), max_queued_groups=3, overflow_action=OverflowAction.DROP_OLDEST, max_staleness=1, batch_groups=1
    )
    await run.fill("a", "b", "c")
    held = await leased(run, REF, 2)
    await run.fill("d")
    assert await run.ledger() == {"accepted": 4, "queued": 3, "dropped_overflow": 1}
    assert await run.push_kinds(columns(run, held[0])) == ["added"]
    await run.batch(0)
    await run.publish(2, 0)
    assert (await run.short(1)).queued == 0
    assert await run.push_kinds(columns(run, held[1])) == ["closed"]
    assert await run.ledger() == {"accepted": 4, "dropped_overflow": 1, "dropped_stale": 2, "trained": 1}
    assert await states(run) == {REF: (0, 0, 1, 0)}
    await run.check()


async def test_a_full_queue_drops_what_waits_in_stages_and_never_what_the_next_batch_needs(run: Run) -> None:
    await run.create(stages=(REF,), max_queued_groups=3, overflow_action=OverflowAction.DROP_OLDEST)
    await run.fill("a", "b")
    a, b = await leased(run, REF)
    assert await run.push_kinds(columns(run, a)) == ["added"]
    await run.fill("c", "d")
    # a is ready, b held, d waits in place of c; then nothing waits.
    (d,) = await leased(run, REF)
    assert d.group_id == "d/0"
    assert await run.push_kinds(run.group("e")) == ["rejected_full"]
    assert await run.push_kinds(columns(run, b), columns(run, d)) == ["added", "added"]
    # Of more than a batch the oldest makes room.
    await run.fill("f")
    assert [group.group_id for group in (await run.batch(0)).shard] == ["b/0", "d/0"]
    await run.check()


async def test_rewards_of_a_stage_are_judged_when_they_are_written(run: Run) -> None:
    await run.create(stages=(REWARDS, REF), filter_equal_rewards=True, max_queued_groups=4, record_groups=True)
    await run.fill("a", "b", rewards=(0.0, 0.0))
    a, b = await leased(run, REWARDS)
    assert await run.push_kinds(columns(run, a, rewards=(1.0, 1.0)), columns(run, b, rewards=(1.0, 0.0))) == [
        "filtered",
        "added",
    ]
    assert await run.ledger() == {"accepted": 2, "queued": 1, "filtered": 1}
    statistics = (await run.view()).statistics
    assert (statistics["filtered_equal_rewards"], statistics["accepted_reward_milli"]) == (1, 3000)
    assert [one.group_id for one in await leased(run, REF)] == ["b/0"]
    rewarded, moved, other = (await recorded(run))[2:]
    assert rewarded == ("rewarded", [run.now, b"a/0", struct.pack("<2f", 1.0, 1.0), b""])
    assert (moved[1][1:3], other[1][1]) == ([b"a/0", b"filtered"], b"b/0")
    await run.check()


async def test_a_stage_that_is_named_no_more_lets_its_groups_go(run: Run) -> None:
    await run.create(stages=(REF, VALUES))
    await run.fill("a", "b")
    (a,) = await leased(run, REF, 1)
    policy = replace((await run.view()).policy, stages=(VALUES,))
    await run.store.call(commands.update_policy(run.run_id, policy))
    assert await run.push_kinds(columns(run, a)) == ["closed"]
    assert await states(run) == {VALUES: (2, 0, 0, 0), REF: (0, 0, 0, 0)}
    assert {one.name: one.passed_over for one in (await run.view()).stages} == {VALUES: 0, REF: 2}
    await run.store.call(commands.update_policy(run.run_id, replace(policy, stages=())))
    assert [group.group_id for group in (await run.batch(0)).shard] == ["a/0", "b/0"]
    await run.check()


async def test_added_columns_go_with_their_group(run: Run) -> None:
    await run.create(stages=(REF,), batch_groups=1, max_queued_groups=4)
    await run.fill("a", "b", "c")
    assert await add(run, REF) == ["added"] * 3
    assert len(await run.payload_keys()) == 6
    await run.batch(0)
    await run.publish(1, 0)
    await run.checkpoint(0)
    assert len(await run.payload_keys()) == 4
    await run.store.delete_run(run.run_id)
    assert await run.payload_keys() == set()


async def test_columns_count_with_the_bytes_of_their_group_and_no_cap_refuses_them(run: Run) -> None:
    await run.create(
        stages=(REF,),
        batch_groups=1,
        max_queued_groups=4,
        max_queued_bytes=MIB,
        quota_bytes=2 * MIB,
        overflow_action=OverflowAction.REJECT,
    )
    await run.fill("a", "b")
    a, b = await leased(run, REF)
    written = await run.write(columns(run, b, bytes(MIB - 20)))
    assert await run.push_kinds(columns(run, a, bytes(MIB)), written) == ["added", "added"]
    # `b` was written by its pusher, and both groups have bodies of six bytes.
    held = {"accepted": 2 * MIB - 8, "queued": 2 * MIB - 8}
    assert await sizes(run) == held
    view = await run.view()
    assert (view.stages[0].added_bytes, view.statistics["written_bytes"]) == (2 * MIB - 20, MIB - 20)
    assert await run.push_kinds(run.group("c")) == ["rejected_full"]
    await run.batch(0)
    assert await sizes(run) == {**held, "queued": MIB - 14, "delivered": MIB + 6}
    assert await run.push_kinds(run.group("c")) == ["queued"], "a queue below its cap has room again"
    await run.batch(1)
    assert await run.push_kinds(run.group("d", bytes(20))) == ["rejected_full"], "the quota counts what is delivered"
    await run.publish(1, 1)
    assert await run.push_kinds(run.group("d", bytes(20))) == ["queued"]
    assert await sizes(run) == {"accepted": 2 * MIB + 16, "queued": 24, "trained": 2 * MIB - 8}
    await run.check()


async def test_columns_leave_with_the_step_that_is_retained_for_its_bytes(run: Run) -> None:
    await run.create(stages=(REF,), batch_groups=1, max_queued_groups=4, max_retained_bytes=1000)
    await run.fill("a", "b")
    a, b = await leased(run, REF)
    assert await run.push_kinds(columns(run, a, bytes(600)), columns(run, b, bytes(600))) == ["added"] * 2
    for step in (0, 1):
        await run.batch(step)
        await run.publish(step + 1, step)
    assert (await run.view()).checkpointed_steps == 1
    await run.check()


async def test_a_group_whose_columns_are_lost_is_generated_anew(run: Run) -> None:
    await run.create(stages=(REF,), batch_groups=1)
    await run.submit("a")
    lease = await run.one_lease()
    assert await run.push_kinds(run.group(lease)) == ["queued"]
    assert await add(run, REF) == ["added"]
    batch = await run.batch(0)
    await run.store.call(commands.report_lost(run.run_id, 1, 0, [batch.shard[0].added[0].payload_key]))
    assert await run.ledger() == {"accepted": 1, "lost": 1}
    assert (await run.one_lease()).incarnation == 1
    await run.check()


async def test_a_resume_takes_groups_back_that_have_passed(run: Run) -> None:
    await run.create(stages=(REF,), batch_groups=1)
    await run.fill("a")
    await add(run, REF)
    await run.batch(0)
    await run.resume(0, ops.ResumeMode.REQUEUE)
    batch = await run.batch(0)
    assert [added.stage for added in batch.shard[0].added] == [REF]
    await run.check()


async def test_a_worker_of_a_stage_is_told_why_a_run_is_paused_and_when_it_goes_on_or_ends(run: Run) -> None:
    await run.create(stages=(REF,))
    await run.fill("a")
    assert (await ask(run, REF, 0)).paused == ""
    await run.store.call(commands.pause_run(run.run_id))
    asked = await ask(run, REF)
    assert (list(asked.leases), asked.waiting, asked.paused) == ([], 1, "operator")
    hints = run.store.notifications
    seen = hints.ticket(run.run_id, Topic.STAGES)
    await run.store.call(commands.continue_run(run.run_id))
    assert await hints.wait(run.run_id, Topic.STAGES, seen, 5) > seen
    (lease,) = await leased(run, REF)
    assert lease.group_id == "a/0"
    seen = hints.ticket(run.run_id, Topic.STAGES)
    await run.store.delete_run(run.run_id)
    assert await hints.wait(run.run_id, Topic.STAGES, seen, 5) > seen


async def test_a_run_that_drains_waits_for_groups_in_stages(run: Run) -> None:
    await run.create(stages=(REF,), batch_groups=1)
    await run.fill("a")
    await run.store.call(commands.drain_run(run.run_id))
    assert (await run.short(0)).queued == 0
    assert await add(run, REF) == ["added"]
    await run.batch(0)
    with pytest.raises(RunPaused, match="drained"):
        await run.pull(1)


async def test_a_first_release_must_not_go_on_with_a_run_that_has_stages(run: Run) -> None:
    """It would give what it accepts to batches at once."""
    await run.create()
    assert (await run.hash("run"))["layout"].isdigit()
    await run.store.call(commands.update_policy(run.run_id, replace((await run.view()).policy, stages=(REF,))))
    assert not (await run.hash("run"))["layout"].isdigit()
    await run.store.delete_run(run.run_id)
    await run.create(stages=(REF,))
    assert not (await run.hash("run"))["layout"].isdigit()


async def test_numbers_of_lost_leases_are_not_given_again(run: Run) -> None:
    """Whoever still works under one must not be taken for who holds the group now."""
    await run.create(stages=(REF,))
    await run.fill("a")
    with pytest.raises(StoreRolledBack):
        await run.pull(0, seen=(await run.view()).revision + 1)
    await run.resume()
    assert [lease.lease_id for lease in await leased(run, REF)] == ["a/0/reference:100000001"]
    await run.check()


async def test_workers_of_a_stage_that_hold_nothing_are_forgotten_when_they_are_many(run: Run) -> None:
    await run.create(stages=(REF,), max_queued_groups=8)
    await run.fill("a")
    held = await leased(run, REF, worker="busy", request_id="r")
    for number in range(300):
        await ask(run, REF, worker=f"w{number}")
    assert len(await run.hash("stage_workers")) <= 256
    assert await leased(run, REF, worker="busy", request_id="r") == held
    await run.check()
