"""Overflow action `drop_stalest`, where it is decided and where it is stated."""

from typing import Any

from buffer_service.domain import ops
from buffer_service.domain.policy import OverflowAction, RunPolicy, StaleAction
from buffer_service.observability.estimate import estimate
from buffer_service.simulator import Simulation, Workload, simulate
from buffer_service.simulator.lengths import Fixed
from tests.oracle.behaviour.world import World
from tests.store.driver import Run
from tests.store.gathering import ids
from tests.support.views import make_loop
from trainer_client import Policy

NAME: Any = "drop_stalest"
POLICY: dict[str, Any] = {"batch_groups": 2, "max_queued_groups": 2, "overflow_action": NAME}
HEADS = {"a": 2, "b": 0, "c": 1}
WAITS: dict[str, Any] = {**POLICY, "max_queued_groups": 4, "max_staleness": 1, "max_lookahead": 1}


async def test_the_store_drops_the_stalest_group(run: Run) -> None:
    await run.create(**{**POLICY, "overflow_action": OverflowAction(NAME)})
    for name, head in HEADS.items():
        assert await run.push_kinds(run.group(name, head=head)) == ["queued"]
    assert await run.ledger() == {"accepted": 3, "queued": 2, "dropped_overflow": 1}
    batch = await run.pull(0, train_version=2)
    assert isinstance(batch, ops.Batch)
    assert ids(batch) == ["a", "c"]
    await run.check()


async def test_a_full_queue_is_no_reason_not_to_wait_in_the_store(run: Run) -> None:
    await run.create(**{**WAITS, "overflow_action": OverflowAction(NAME), "stale_action": StaleAction.WAIT})
    await run.submit("late")
    late = await run.one_lease()
    await run.publish(1)
    await run.fill(*"abcd", head=1)
    assert (await run.short(0)).awaited == 1
    assert await run.push_kinds(run.group(late)) == ["queued"]


def test_the_model_drops_it_too() -> None:
    world = World(**POLICY)
    for name in HEADS:
        assert world.push(name) is ops.PushKind.QUEUED
    assert (world.groups("queued"), world.groups("dropped_overflow")) == (2, 1)


def test_a_full_queue_is_no_reason_not_to_wait_in_the_model() -> None:
    world = World(**WAITS, stale_action="wait")
    world.submit("late")
    late = world.lease_one()
    world.publish(1)
    world.queue(4, head=1)
    short = world.pull()
    assert isinstance(short, ops.Short)
    assert short.awaited == 1
    assert world.push(late) is ops.PushKind.QUEUED


def test_the_estimate_and_the_simulator_know_it() -> None:
    policy = RunPolicy(batch_groups=16, overflow_action=OverflowAction(NAME))
    assert estimate(make_loop(policy)).predicted.form.startswith("queue-drop")
    played = simulate(Simulation(policy=policy, workload=Workload(4, 1, 1.0, Fixed(10)), steps=2, warmup=0))
    assert played is not None


def test_a_trainer_states_it() -> None:
    assert Policy.from_wire(Policy(overflow_action=NAME).to_wire()).overflow_action == NAME
