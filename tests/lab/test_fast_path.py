"""The compact buffer decides what the reference model decides, step for step, whatever the policy."""

import random
from collections.abc import Callable, Iterator

import pytest

from buffer_service.domain.policy import UNSET, Order, OverflowAction, RunPolicy, StaleAction, StalenessMeasure
from buffer_service.domain.presets import fields_of
from buffer_service.domain.steering.decisions import Decision, Situation
from buffer_service.domain.steering.knobs import Knobs
from buffer_service.simulator import Simulation, SimulationResult, Workload, simulate
from buffer_service.simulator.buffer import Buffer
from buffer_service.simulator.compact_buffer import CompactBuffer
from buffer_service.simulator.lengths import Fixed, Lengths, Lognormal
from buffer_wire.errors import InvalidRequest, RolloutBufferError
from tests.lab.model_buffer import ModelBuffer


def played(
    simulation: Simulation, buffer: Callable[[RunPolicy], Buffer]
) -> tuple[SimulationResult | str, list[list[tuple[str, int, int]]]]:
    """The result, or why it got stuck, and every decision; groups of one pull have no order among themselves."""
    decisions: list[list[tuple[str, int, int]]] = [[]]

    def note(kind: str, group: int, step: int) -> None:
        if kind != "taken" or not decisions[-1] or decisions[-1][-1][0] != "taken":
            decisions.append([])
        decisions[-1].append((kind, group, step))

    try:
        result: SimulationResult | str = simulate(simulation, note, buffer)
    except InvalidRequest as stuck:
        result = stuck.message
    return result, [sorted(together) for together in decisions]


def both(policy: RunPolicy, workload: Workload, *, steps: int, warmup: int, seed: int) -> SimulationResult | str:
    simulation = Simulation(
        policy=policy, workload=workload, steps=steps, warmup=warmup, seed=seed, controller=at_random
    )
    compact, model = (played(simulation, buffer) for buffer in (CompactBuffer, ModelBuffer))
    assert compact[1] == model[1]
    assert compact[0] == model[0]
    return compact[0]


def at_random(situation: Situation) -> Decision:
    """A controller that lowers anything, the same after each publish of a version."""
    dice, batch = random.Random(situation.version), situation.policy.batch_groups
    knobs = Knobs(
        micro_batch_groups=dice.randint(0, batch),
        max_queued_groups=dice.choice([0, dice.randint(1, 4 * batch)]),
        lookahead_milli=dice.choice([UNSET, dice.randint(0, 3_000)]),
        max_inflight_groups=dice.choice([0, dice.randint(1, 2 * batch)]),
    )
    return Decision(version=situation.version, knobs=knobs)


NAMED = (
    *("queue_drop(1)", "queue_drop(2)", "queue_max(1)", "queue_max(3)", "streaming(1)", "streaming(3)"),
    *("sync", "one_step_off", "areal(2)", "miles", "miles_docs(1)"),
)


@pytest.mark.parametrize("rho", [0.7, 1.0, 1.6])
@pytest.mark.parametrize("preset", NAMED)
def test_every_preset_is_played_alike(preset: str, rho: float) -> None:
    policy = RunPolicy(**{"batch_groups": 4, **fields_of(preset, 4)})  # type: ignore[arg-type]
    result = both(policy, Workload(24, 3, rho, Lognormal.with_mean(200, 0.8)), steps=25, warmup=5, seed=3)
    assert isinstance(result, SimulationResult)
    assert result.steps == 25


def random_policies(count: int) -> Iterator[tuple[int, RunPolicy, Workload]]:
    """Policies that are accepted, of every field that the simulation knows, with workloads."""
    made = 0
    for seed in range(100_000):
        dice = random.Random(seed)
        batch = dice.randint(1, 5)
        fields = {
            "batch_groups": batch,
            "max_queued_groups": dice.randint(1, 4 * batch),
            "overflow_action": dice.choice([OverflowAction.DROP_OLDEST, OverflowAction.BLOCK]),
            "max_staleness": dice.choice([UNSET, 0, 1, 2, 3]),
            "stale_action": dice.choice(list(StaleAction)),
            "staleness_measure": dice.choice(list(StalenessMeasure)),
            "max_incarnations": dice.choice([0, 1, 2]),
            "order": dice.choice([*Order, Order.SUBMISSION]),
            "order_window_groups": dice.choice([0, 1, batch, 2 * batch]),
            "stale_wait_ms": 3_600_000,
            "max_inflight_groups": dice.choice([0, 0, dice.randint(1, 2 * batch)]),
            "max_lookahead": dice.choice([UNSET, UNSET, 0, 1, 3]),
            "reserve_queue_space": dice.random() < 0.2,
            "micro_batch_groups": dice.choice([0, 0, dice.randint(1, batch)]),
            "batches_per_publish": dice.choice([1, 1, 2]),
            "prefetch_batches": dice.choice([0, 0, 1, 2]),
            "target_staleness_milli": dice.choice([0, 1_000]),
        }
        try:
            policy = RunPolicy(**fields)
        except RolloutBufferError:
            continue
        lengths: Lengths = Fixed(50) if dice.random() < 0.5 else Lognormal.with_mean(100, 0.9, 400)
        pause = dice.choice([0.0, 30.0])
        workload = Workload(
            dice.randint(1, 30),
            dice.randint(1, 4),
            dice.uniform(0.3, 2.0),
            lengths,
            reload_pause=pause,
            publish_lag=dice.choice([0.0, 0.0, 20.0, 300.0]),
        )
        yield seed, policy, workload
        made += 1
        if made == count:
            return


def test_any_policy_is_played_alike() -> None:
    ended = losing = 0
    for seed, policy, workload in random_policies(120):
        result = both(policy, workload, steps=15, warmup=2, seed=seed)
        if isinstance(result, SimulationResult):
            ended += 1
            losing += result.dropped_groups + result.recycled_groups > 0
    # A policy that is accepted never gets stuck; a few runs end before anything is generated after their warm-up.
    assert ended > 115
    assert losing > 30
