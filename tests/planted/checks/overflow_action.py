"""Overflow action `drop_stalest`, where it is decided and where it is stated."""

from typing import Any

from buffer_service.domain import ops
from buffer_service.domain.policy import OverflowAction, RunPolicy
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


async def test_the_store_drops_the_stalest_group(run: Run) -> None:
    await run.create(**{**POLICY, "overflow_action": OverflowAction(NAME)})
    for name, head in HEADS.items():
        assert await run.push_kinds(run.group(name, head=head)) == ["queued"]
    assert await run.ledger() == {"accepted": 3, "queued": 2, "dropped_overflow": 1}
    batch = await run.pull(0, train_version=2)
    assert isinstance(batch, ops.Batch)
    assert ids(batch) == ["a", "c"]
    await run.check()


def test_the_model_drops_it_too() -> None:
    world = World(**POLICY)
    for name in HEADS:
        assert world.push(name) is ops.PushKind.QUEUED
    assert (world.groups("queued"), world.groups("dropped_overflow")) == (2, 1)


def test_the_estimate_and_the_simulator_know_it() -> None:
    policy = RunPolicy(batch_groups=16, overflow_action=OverflowAction(NAME))
    assert estimate(make_loop(policy)).predicted.form.startswith("queue-drop")
    played = simulate(Simulation(policy=policy, workload=Workload(4, 1, 1.0, Fixed(10)), steps=2, warmup=0))
    assert played is not None


def test_a_trainer_states_it() -> None:
    assert Policy.from_wire(Policy(overflow_action=NAME).to_wire()).overflow_action == NAME
