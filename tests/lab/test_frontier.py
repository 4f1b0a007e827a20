"""The frontier of policies: who is beaten, by whom, and what decides nothing."""

from dataclasses import replace

from buffer_service.simulator import Workload
from buffer_service.simulator.lengths import Lognormal
from rollout_lab.comparison import Candidate, Comparison, tried
from rollout_lab.frontier import INDISTINCT, Point, beaten_by, point
from rollout_lab.queue_policies import queue_policy

BASE = Point(name="base", staleness=2.0, throughput=0.9, bias=-0.05, oldest=4, spread=(0.0, 0.0, 0.0))


def test_a_point_is_beaten_by_one_that_is_better_in_any_measure_and_worse_in_none() -> None:
    fresher, faster = replace(BASE, staleness=1.5), replace(BASE, throughput=1.0)
    fairer, dearer = replace(BASE, bias=0.01), replace(BASE, staleness=1.0, throughput=0.5)
    assert beaten_by(BASE, [BASE, fairer, faster, dearer, fresher]) == [fresher, fairer, faster]
    assert beaten_by(dearer, [BASE, fairer, faster, fresher]) == []


def test_preferring_long_responses_is_as_bad_as_preferring_short_ones() -> None:
    assert beaten_by(replace(BASE, bias=0.05), [BASE]) == []
    assert beaten_by(replace(BASE, bias=0.08), [BASE]) == [BASE]


def test_a_difference_within_the_noise_decides_nothing() -> None:
    within = replace(BASE, staleness=BASE.staleness - 0.9 * INDISTINCT["staleness"])
    assert beaten_by(BASE, [within]) == []
    slower = replace(BASE, staleness=1.0, throughput=BASE.throughput - 0.9 * INDISTINCT["throughput"])
    assert beaten_by(BASE, [slower]) == [slower]


def test_points_are_means_over_seeds_of_trials_on_the_same_engines() -> None:
    workload = Workload(concurrency=64, group_size=8, rho=1.1, lengths=Lognormal.with_mean(500, 0.8))
    drop, strict = Candidate("drop", queue_policy("queue_drop", 8)), Candidate("max", queue_policy("queue_max(1)", 8))

    def measured(one: Candidate) -> Point:
        return point([tried(Comparison(candidates=[], workload=workload, steps=60, seed=s), one, 1.0) for s in (0, 1)])

    free, gated = measured(drop), measured(strict)
    assert gated.oldest == 1 < free.oldest
    assert gated.throughput < free.throughput <= 1.0
    assert gated.bias < -0.05 < free.bias
    assert all(deviation > 0 for deviation in free.spread)
    assert beaten_by(free, [gated]) == beaten_by(gated, [free]) == []
