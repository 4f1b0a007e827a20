"""A resume that moves thousands of groups goes on in portions; in between, and after a crash, the run is in order."""

from collections.abc import Sequence
from typing import Any

import pytest

from buffer_service import commands
from buffer_service.commands.replies import pack
from buffer_service.domain import ops
from buffer_service.domain.command import Command
from buffer_service.domain.policy import OverflowAction
from buffer_wire.errors import RunPaused, StaleTerm, StepAhead, StoreRolledBack
from tests.store.driver import Run, weights

REPLAY, REQUEUE, DISCARD = ops.ResumeMode.REPLAY, ops.ResumeMode.REQUEUE, ops.ResumeMode.DISCARD


async def push_many(run: Run, names: Sequence[str], **kwargs: Any) -> None:
    for first in range(0, len(names), 500):
        await run.push(*(run.group(name, **kwargs) for name in names[first : first + 500]))


async def assembled(run: Run, steps: int, groups: int, **policy: Any) -> None:
    """`steps` steps of `groups` groups each, the first one trained."""
    await run.create(**({"batch_groups": groups, "max_queued_groups": steps * groups} | policy))
    for step in range(steps):
        await push_many(run, [f"t{step}-{index}" for index in range(groups)])
        await run.batch(step)
    await run.commit(0)


async def portion(run: Run, step: int, mode: ops.ResumeMode, request_id: str = "first") -> str:
    """One call of the script; the process dies after it."""
    arguments = pack(step, mode.value, request_id, 0)
    return await run.store.call(Command(run.run_id, "resume", arguments, lambda tag, _: tag))


@pytest.mark.parametrize("mode", [REQUEUE, DISCARD])
async def test_every_portion_leaves_a_run_in_order(run: Run, mode: ops.ResumeMode) -> None:
    await assembled(run, 3, 900)
    await run.fill("queued")
    before = await run.view()
    portions = 0
    while await portion(run, 0, mode) == "more":
        portions += 1
        view = await run.view()
        assert (view.paused, view.term, view.revision) == ("resuming", 2, before.revision)
        await run.check()
    assert portions >= 2
    view = await run.view()
    assert (view.paused, view.term, view.next_step, view.committed_steps) == ("", 2, 0, 0)
    assert view.revision == before.revision + 1
    kept = {"queued": 2700, "dropped_overflow": 1} if mode is REQUEUE else {"queued": 1, "discarded": 2700}
    assert await run.ledger() == {"accepted": 2701} | kept
    await run.check()


async def test_a_resume_that_died_is_finished_by_the_same_request(run: Run) -> None:
    await assembled(run, 2, 1100)
    assert await portion(run, 0, REQUEUE) == "more"
    resumed = await run.resume(0, REQUEUE, request_id="first")
    assert (resumed.term, resumed.next_step, resumed.next_unassembled_step) == (2, 0, 0)
    assert await run.resume(0, REQUEUE, request_id="first") == resumed
    assert len(await run.queue()) == 2200
    assert (await run.queue())[:2] == ["t0-0/0", "t0-1/0"]


async def test_another_resume_first_finishes_the_one_that_died(run: Run) -> None:
    await assembled(run, 2, 1100)
    assert await portion(run, 1, DISCARD) == "more"
    resumed = await run.resume(0, REQUEUE, request_id="second")
    assert (resumed.term, resumed.next_step) == (3, 0)
    assert await run.ledger() == {"accepted": 2200, "queued": 1100, "discarded": 1100}
    await run.check()


async def test_another_resume_is_judged_by_the_finished_state(run: Run) -> None:
    await assembled(run, 2, 1100)
    assert await portion(run, 0, DISCARD) == "more"
    with pytest.raises(StepAhead):
        await run.resume(1)
    assert ((await run.view()).paused, (await run.view()).term) == ("", 2)


async def test_nobody_trains_while_a_resume_is_under_way(run: Run) -> None:
    await assembled(run, 2, 1100)
    await run.submit("task")
    assert await portion(run, 1, REQUEUE) == "more"
    with pytest.raises(StaleTerm):
        await run.pull(0)
    run.term = 2
    for attempt in (
        run.pull(0),
        run.pull(1),
        run.commit(0),
        run.publish(1),
        run.checkpoint(0),
        run.submit("another"),
    ):
        with pytest.raises(RunPaused, match="resuming"):
            await attempt
    assert (await run.store.call(commands.weights(run.run_id))).paused
    assert (await run.lease()).wait is ops.LeaseWait.PAUSED
    ledger = await run.ledger()
    await run.lose(1, "t1-0/0")
    await run.lose(0, "t0-0/0")
    assert await run.ledger() == ledger
    assert (await run.resume(1, REQUEUE, request_id="first")).next_step == 1
    assert len((await run.lease()).grants) == 1


@pytest.mark.parametrize(
    ("action", "afterwards"),
    [
        (OverflowAction.DROP_OLDEST, ops.PushKind.QUEUED),
        (OverflowAction.BLOCK, ops.PushKind.BLOCKED),
        (OverflowAction.REJECT, ops.PushKind.REJECTED_FULL),
    ],
)
async def test_pushes_that_find_no_room_wait_for_the_end_of_a_resume(
    run: Run, action: OverflowAction, afterwards: ops.PushKind
) -> None:
    await assembled(run, 2, 1100, overflow_action=action, max_queued_groups=1100)
    await push_many(run, [f"q{index}" for index in range(1099)])
    assert await portion(run, 0, DISCARD) == "more"
    late = [run.group(name, head=weights(0)) for name in ("fits", "late")]
    fits, blocked = await run.push(*late)
    assert (fits.kind, blocked.kind) == (ops.PushKind.QUEUED, ops.PushKind.BLOCKED)
    await run.resume(0, DISCARD, request_id="first")
    retried = await run.store.retry_push(run.run_id, [(late[1].facts, blocked.payload_key)])
    assert [outcome.kind for outcome in retried.outcomes] == [afterwards]
    assert (await run.queue())[-1] == ("late/0" if afterwards is ops.PushKind.QUEUED else "fits/0")
    await run.store.call(commands.abandon_push(run.run_id, [blocked.payload_key]))
    await run.check()


async def test_leases_end_as_usual_while_a_resume_is_under_way(run: Run) -> None:
    await run.create(batch_groups=1100, max_queued_groups=2200, max_staleness=5)
    await run.submit("task", "given", "expiring")
    leases = list((await run.lease(3)).grants)
    for step in range(2):
        await push_many(run, [f"t{step}-{index}" for index in range(1100)])
        await run.batch(step)
    assert await portion(run, 0, DISCARD) == "more"
    extended = await run.store.call(commands.extend(run.run_id, "w", "i", [leases[0].lease_id]))
    assert list(extended.states) == [ops.LeaseState.LIVE]
    assert await run.give_back(leases[1]) == ["pending"]
    await run.pass_ms(60_001)
    await run.store.sweep()
    assert (await run.view()).paused == "resuming"
    assert await run.tasks() == {"submitted": 2203, "pending": 3, "completed": 2200}
    await run.resume(0, DISCARD, request_id="first")
    await run.check()


async def test_thousands_of_heads_are_clamped_in_portions(run: Run) -> None:
    await run.create(batch_groups=2500, max_staleness=4)
    await run.publish(4)
    await push_many(run, [f"t{index}" for index in range(2500)], head=4)
    await run.store._connection.command("DEL", f"rb:{{{run.run_id}}}:commits")
    assert await portion(run, 0, REPLAY) == "more"
    await run.check()
    resumed = await run.resume(0, REPLAY, request_id="first")
    assert resumed.version == 0
    ages = await run.command("ZRANGE", f"rb:{{{run.run_id}}}:a:0:env", 0, -1, "WITHSCORES")
    assert set(ages[1::2]) == {b"0"}
    assert (await run.short(0, train_version=5)).queued == 0
    assert await run.ledger() == {"accepted": 2500, "dropped_stale": 2500}
    await run.check()


async def test_caps_are_held_again_in_portions(run: Run) -> None:
    await assembled(run, 3, 1000)
    policy = (await run.view()).policy
    smaller = type(policy)(batch_groups=10, max_queued_groups=100)
    await run.store.call(commands.update_policy(run.run_id, smaller))
    await run.resume(0, REQUEUE)
    assert await run.ledger() == {"accepted": 3000, "queued": 100, "dropped_overflow": 2900}
    assert (await run.queue())[0] == "t2-900/0"
    await run.check()


async def test_thousands_of_trained_steps_are_replayed_in_portions(run: Run) -> None:
    await run.create(batch_groups=1, max_queued_groups=2500, retained_steps=5000)
    await push_many(run, [f"t{index}" for index in range(2500)])
    for step in range(2500):
        await run.batch(step)
    await run.commit(2499)
    assert await portion(run, 100, REPLAY) == "more"
    view = await run.view()
    assert 100 < view.committed_steps < 2500
    await run.check()
    resumed = await run.resume(100, REPLAY, request_id="first")
    assert (resumed.next_step, resumed.next_unassembled_step) == (100, 2500)
    assert await run.ledger() == {"accepted": 2500, "trained": 100, "delivered": 2400}
    await run.check()


async def test_a_roll_back_that_shows_in_between_is_forgiven_at_the_end(run: Run) -> None:
    await assembled(run, 2, 1100)
    assert await portion(run, 0, DISCARD) == "more"
    with pytest.raises(StoreRolledBack):
        await run.lease(seen=5000)
    assert (await run.view()).paused == "store_rolled_back"
    with pytest.raises(RunPaused):
        await run.push(run.group("t"))
    resumed = await run.resume(0, DISCARD, request_id="first")
    assert ((await run.view()).paused, resumed.revision) == ("", 5001)
    await run.check()


async def test_an_operators_pause_outlasts_a_resume(run: Run) -> None:
    await assembled(run, 2, 1100)
    assert await portion(run, 0, DISCARD) == "more"
    await run.store.call(commands.pause_run(run.run_id))
    assert (await run.view()).paused == "resuming"
    await run.resume(0, DISCARD, request_id="first")
    assert (await run.view()).paused == "operator"


async def test_a_small_resume_is_one_call(run: Run) -> None:
    await assembled(run, 2, 100)
    assert await portion(run, 0, REQUEUE) == "resumed"
