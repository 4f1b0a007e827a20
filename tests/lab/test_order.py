"""Orders in the simulator: what a window bounds, and what the longest first is good for."""

from typing import Any

import pytest

from buffer_service.domain.policy import Order, RunPolicy
from buffer_service.domain.presets import fields_of
from buffer_service.simulator import Simulation, SimulationResult, Workload, simulate
from buffer_service.simulator.lengths import Lognormal

N = 8
LENGTHS = Lognormal.with_mean(200, 1.0, 2_000)


def simulated(preset: str, slots: int, *, error: float = 0.0, **fields: Any) -> SimulationResult:
    policy = RunPolicy(**{"batch_groups": N, **fields_of(preset, N), **fields})
    workload = Workload(slots, 4, 0.8, LENGTHS, submitted_together=N, estimate_error=error)
    return simulate(Simulation(policy=policy, workload=workload, steps=120, warmup=20, seed=2))


def test_a_narrower_window_has_fewer_groups_far_older_than_the_mean_and_prefers_no_length() -> None:
    ahead: dict[str, Any] = {"max_staleness": -1, "max_inflight_groups": 0, "order": Order.SUBMISSION}
    found = [simulated("areal(4)", 32, order_window_groups=wide, **ahead) for wide in (0, 2 * N, 1)]
    stalest = [result.staleness_max for result in found]
    assert stalest == sorted(stalest, reverse=True)
    assert stalest[0] > stalest[1] > stalest[2] == 4
    assert [result.wasted_token_share for result in found] == [0, 0, 0]
    assert [result.length_bias for result in found] == pytest.approx([0, 0, 0], abs=0.02)


def test_with_few_slots_a_batch_whose_longest_begin_first_ends_sooner_the_better_they_are_known() -> None:
    in_turn, exact, guessed = (
        simulated("sync", 8, longest_first=first, error=error)
        for first, error in ((False, 0.0), (True, 0.0), (True, 1.0))
    )
    assert exact.train_period_ratio < guessed.train_period_ratio < in_turn.train_period_ratio
    assert exact.trained_mean_length == pytest.approx(in_turn.trained_mean_length, rel=0.01)
