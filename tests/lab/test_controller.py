"""The controller in the simulator: it holds its target through a jump, without swinging, at the best speed."""

import pytest

from buffer_service.control.decision import decide
from buffer_service.domain.policy import RunPolicy, TargetMeasure
from buffer_service.domain.steering.decisions import Decision, Outcome, Situation
from buffer_service.simulator import Simulation, SimulationResult, Workload, simulate
from buffer_service.simulator.lengths import Lognormal
from buffer_service.simulator.workload import Jump

LENGTHS = Lognormal.with_mean(1_000.0, 0.5)
BEFORE, AFTER, MEASURED = 20, 50, 30


def steered(target_milli: int, jump: Jump, **policy: object) -> tuple[SimulationResult, list[Decision]]:
    decisions = []

    def controller(situation: Situation) -> Decision:
        decisions.append(decide(situation))
        return decisions[-1]

    stated = RunPolicy(batch_groups=8, max_queued_groups=32, target_staleness_milli=target_milli, **policy)  # type: ignore[arg-type]
    simulation = Simulation(
        policy=stated,
        workload=Workload(64, 4, 0.8, LENGTHS),
        steps=MEASURED,
        warmup=BEFORE + AFTER - MEASURED,
        controller=controller,
        jump=jump,
    )
    return simulate(simulation), decisions


@pytest.mark.parametrize("jump", [Jump(BEFORE, speed=2.0), Jump(BEFORE, speed=0.5), Jump(BEFORE, length=2.0)])
@pytest.mark.parametrize("measure", list(TargetMeasure))
def test_a_target_is_held_through_a_jump(jump: Jump, measure: TargetMeasure) -> None:
    result, decisions = steered(1_500, jump, target_measure=measure)
    mean = result.token_staleness if measure is TargetMeasure.TOKEN else result.staleness
    assert mean == pytest.approx(1.5, abs=0.25)
    assert len(decisions) == BEFORE + AFTER, "one decision for each publish"
    assert sum(one.outcome is Outcome.MOVED for one in decisions[-MEASURED:]) <= 2


def test_a_target_above_what_the_run_has_costs_nothing() -> None:
    result, decisions = steered(9_000, Jump(0))
    plain, _ = steered(0, Jump(0))
    assert (result.staleness, result.train_period_ratio) == (plain.staleness, plain.train_period_ratio)
    assert decisions[-1].outcome is Outcome.OPEN


def test_a_target_below_what_prefetching_leaves_is_given_up_by_name() -> None:
    _, decisions = steered(200, Jump(0), prefetch_batches=2)
    assert decisions[-1].outcome is Outcome.OUT_OF_REACH
    assert "prefetch_batches 0" in decisions[-1].reason
