"""A controller's decisions in the store: one for each publish, kept, and in effect below the policy's own values."""

from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from buffer_service import commands
from buffer_service.control.decision import decide
from buffer_service.domain import ops
from buffer_service.domain.steering.decisions import Decision, Outcome, Situation
from buffer_service.domain.steering.knobs import Knobs
from buffer_service.rpc.convert.inspection import to_waits
from buffer_service.rpc.flow.steering import steer
from tests.store.driver import Run, beside, weights

TARGET: dict[str, Any] = {"batch_groups": 4, "max_queued_groups": 16, "target_staleness_milli": 1_500}


async def decided(run: Run, version: int, **knobs: int) -> bool:
    decision = Decision(version=version, moved_at=version, target_milli=1_500, knobs=Knobs(**knobs), reason="why")
    return await run.store.call(commands.decide(run.run_id, decision))


async def situation(run: Run) -> Situation:
    found = await run.store.call(commands.situation(run.run_id))
    assert found is not None
    return found


async def granted(run: Run) -> int:
    return len((await run.lease(50)).grants)


async def feed(run: Run, tasks: int = 60) -> None:
    await run.submit(*(f"t{i}" for i in range(tasks)))


async def test_a_fraction_of_a_version_is_room_for_a_part_of_a_batch(run: Run) -> None:
    await run.create(**TARGET)
    await feed(run)
    await run.publish(1)
    assert await decided(run, 1, lookahead_milli=1_250)
    assert await granted(run) == 4 + 5


async def test_a_limit_in_flight_counts_below_the_policys_own_and_goes_with_the_target(run: Run) -> None:
    await run.create(**TARGET, max_inflight_groups=8)
    await feed(run)
    await run.publish(1)
    assert await decided(run, 1, max_inflight_groups=9, lookahead_milli=9_000)
    assert await granted(run) == 8
    await run.publish(2)
    assert await decided(run, 2, max_inflight_groups=3)
    assert await granted(run) == 0
    policy = (await run.view()).policy
    assert policy.max_inflight_groups == 8, "as the user stated it"
    off = replace(policy, target_staleness_milli=0, max_inflight_groups=10)
    await run.store.call(commands.update_policy(run.run_id, off))
    assert await granted(run) == 2


async def test_the_queues_room_is_lowered_never_below_a_batch(run: Run) -> None:
    await run.create(**TARGET)
    await run.fill("a", "b", "c", "d")
    await run.batch(0)
    await run.publish(1)
    assert await decided(run, 1, max_queued_groups=2)
    await run.fill(*"efghij")
    assert (await run.ledger())["queued"] == 4
    assert (await run.ledger())["dropped_overflow"] == 2


async def test_a_step_keeps_the_micro_batches_that_it_began_with(run: Run) -> None:
    await run.create(**TARGET, micro_batch_groups=4)
    await run.publish(1)
    assert await decided(run, 1, micro_batch_groups=2)
    await run.fill(*"abcd")
    assert not (await run.batch(0)).final
    await run.publish(2)
    assert await decided(run, 2, micro_batch_groups=1)
    assert (await run.batch(0, 1)).final


async def test_each_publish_has_one_decision_whichever_replica_makes_it_first(run: Run) -> None:
    await run.create(**TARGET)
    other = await beside(run.store)
    await run.publish(1)
    made = [decide(await situation(one)) for one in (run, Run(other))]
    assert made[0] == made[1], "a decision follows from the situation alone"
    kept = [await store.call(commands.decide(run.run_id, made[0])) for store in (run.store, other)]
    assert kept == [True, False]
    assert (await run.view()).decision == made[0]
    assert not await decided(run, 0), "made before the publish"
    await other.close()


async def test_a_decision_is_kept_whole_and_the_next_goes_on_from_it(run: Run) -> None:
    await run.create(**TARGET)
    await run.publish(1)
    first = decide(await situation(run))
    assert first.outcome is Outcome.MOVED
    assert await run.store.call(commands.decide(run.run_id, first))
    await run.publish(2)
    assert (await situation(run)).decided == first
    assert (await run.view()).decision == first


async def test_a_run_without_a_target_has_nothing_to_decide(run: Run) -> None:
    await run.create(batch_groups=4)
    await run.publish(1)
    assert await run.store.call(commands.situation(run.run_id)) is None
    assert not await decided(run, 1, max_inflight_groups=1)


async def test_an_engine_that_the_policy_itself_holds_back_is_not_held_by_the_controller(run: Run) -> None:
    await run.create(**TARGET, max_inflight_groups=2)
    await feed(run)
    await run.publish(1)
    assert await decided(run, 1, lookahead_milli=1_500)
    assert await granted(run) == 2
    assert (await situation(run)).held_at == -1
    await run.publish(2)
    assert await decided(run, 2, max_inflight_groups=1)
    assert await granted(run) == 0
    assert (await situation(run)).held_at == -1


async def test_who_looks_at_waits_sees_the_room_that_is_in_effect(run: Run) -> None:
    await run.create(**TARGET)
    await feed(run)
    await run.publish(1)
    assert await decided(run, 1, lookahead_milli=1_250, max_inflight_groups=30)
    waits = await run.store.waits(run.run_id, 1)
    assert (waits.policy.max_lookahead, waits.clock.lookahead_milli) == (2, 1_250)
    rooms = {room.rule: room.groups for room in to_waits(waits).admission.rooms}
    assert rooms == {"max_inflight_groups": 30, "max_lookahead": 4 + 5}


async def test_a_held_engine_is_noted_with_the_version(run: Run) -> None:
    await run.create(**TARGET)
    await feed(run)
    await run.publish(3)
    assert await decided(run, 3, lookahead_milli=0)
    assert await granted(run) == 4
    assert (await situation(run)).held_at == 3


async def test_after_a_resume_the_knobs_stay_and_the_next_publish_is_decided(run: Run) -> None:
    await run.create(**TARGET)
    await feed(run)
    for version in (1, 2):
        await run.publish(version)
        await decided(run, version, lookahead_milli=500)
    await run.resume(next_step=0)
    assert await granted(run) == 4 + 2
    version = (await run.view()).published.version + 1
    await run.publish(version)
    assert await decided(run, version, lookahead_milli=0)


@pytest.mark.parametrize("target_milli", [500, 1_500, 2_000])
async def test_a_run_in_the_store_is_held_at_its_target_however_much_its_engines_would_take(
    run: Run, target_milli: int
) -> None:
    await run.create(batch_groups=4, max_queued_groups=64, target_staleness_milli=target_milli)
    await feed(run, 200)
    begun = deque[tuple[ops.LeaseGrant, int]]()
    staleness: list[int] = []
    for step in range(24):
        most = 99 if step else 4
        begun += [(grant, step) for grant in (await run.lease(most, loaded=weights(step))).grants]
        done = [begun.popleft() for _ in range(4)]
        await run.push(*(run.group(grant, head=weights(version)) for grant, version in done))
        batch = await run.batch(step)
        staleness += [batch.train_version - group.head_version for group in batch.shard]
        await run.publish(step + 1, commit_through=step)
        await steer(run.store, run.run_id)
    assert sum(staleness[-40:]) / 40 == pytest.approx(target_milli / 1_000, abs=0.15)
    assert (await run.view()).decision.outcome is Outcome.HOLDING
