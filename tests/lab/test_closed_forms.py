"""The closed forms against the page, against each other, and against brute force."""

import math

import numpy as np
import pytest

from buffer_service.domain.policy import OverflowAction, RunPolicy
from buffer_service.observability.estimate import closed_forms as cf
from buffer_service.simulator import Simulation, Workload, simulate
from buffer_service.simulator.lengths import Lognormal
from buffer_wire.errors import InvalidField


def test_in_queue_staleness_jumps_from_one_to_q_at_balance() -> None:
    assert cf.in_queue(3, 1.0) == 1.0
    assert cf.in_queue(3, 1.0 + 1e-9) == pytest.approx(3.0, abs=1e-6)
    assert cf.in_queue(1, 0.67) == 0.67
    assert cf.in_queue(2, 1.5) == pytest.approx(0.5 + 1.5 / 1.5)


def test_generation_costs_as_many_versions_as_are_published_meanwhile() -> None:
    # M·L̄/v = 1.42 · 1000 tokens at one token a second; a batch of 240 takes 240 · 1000 / 120 seconds.
    assert cf.pre_queue(120 / 240, 0.63, 1.42) == pytest.approx(1420 / 2000)
    # Train-bound: the period is longer by ρ.
    assert cf.pre_queue(1.0, 1.25, 1.5) == pytest.approx(1.5 / 1.25)


def test_updates_over_an_age_that_ends_with_an_update() -> None:
    period, ages = 10.0, [30.0 + 0.01 * i for i in range(1_000)]
    counted = [sum(k * period <= age for k in range(100)) for age in ages]
    mean_age = sum(ages) / len(ages)
    assert sum(counted) / len(counted) == pytest.approx(cf.updates_over(mean_age / period), abs=0.01)


@pytest.mark.parametrize(("groups", "queue_factor", "rho"), [(16, 1, 0.8), (16, 1, 1.0), (8, 1, 1.4), (16, 2, 0.9)])
def test_the_period_of_small_batches_is_that_of_counting(groups: int, queue_factor: float, rho: float) -> None:
    arrived = np.random.default_rng(0).poisson(rho * groups, 400_000)
    if rho <= 1:
        counted = 1 + np.maximum(0, arrived - queue_factor * groups).mean() / groups
    else:
        counted = 1 + np.maximum(0, groups - arrived).mean() / (rho * groups)
    assert cf.small_batch_period(groups, queue_factor, rho) == pytest.approx(counted, abs=0.006)
    assert cf.small_batch_period(100_000, queue_factor, rho) == pytest.approx(1, abs=0.005)


def test_streaming_is_the_whole_batch_with_one_micro_batch() -> None:
    for rho in (0.3, 0.7, 1.0):
        assert cf.in_queue_streaming(1.0, 1.0, rho) == cf.in_queue(1, rho)


def test_streaming_in_queue_staleness_follows_from_playing_the_queue() -> None:
    """Train-bound, in the fluid limit: after an update take n, then drop what comes in too much, until none is old."""
    for micro, queue, rho in ((4.0, 2.0, 1.5), (4.0, 3.0, 1.2), (2.0, 5.0, 1.7), (4.0, 2.0, 2.5)):
        old, trained = queue * micro, 0.0
        while old > 1e-9:
            taken = min(old, micro)
            trained, old = trained + taken, old - taken
            old -= min(old, (rho - 1) * micro)
        assert cf.in_queue_streaming(micro / 32, queue, rho) == pytest.approx(trained / 32)


# ── a fixed budget ──────────────────────────────────────────────────────────


def test_the_period_of_a_budget_is_least_at_balance() -> None:
    def period(rho: float) -> float:
        return cf.period_of_budget(128 * 1_400, 16, 3_000, 9_000, rho)

    falling = [period(0.1 * i) for i in range(1, 11)]
    rising = [period(1 + 0.1 * i) for i in range(11)]
    assert falling == sorted(falling, reverse=True)
    assert rising == sorted(rising)
    # By counting GPUs: 12 generate 36,000 tokens a second, 4 train as many.
    assert period(1.0) == pytest.approx(128 * 1_400 / 36_000)


@pytest.mark.parametrize("kappa", [0.05, 0.3, 1.0, 4.0])
def test_the_train_bound_twin_has_the_same_period_and_pre_queue_staleness(kappa: float) -> None:
    for rho in (0.4, 0.7, 0.95):
        twin = cf.train_bound_twin(rho, kappa)
        ours, theirs = (cf.period_of_budget(1_000, 8, 1.0, kappa, value) for value in (rho, twin))
        assert ours == pytest.approx(theirs)
        # PQS is generation over the period; R, and with it generation, differs by the split.
        share = [kappa * value / (1 + kappa * value) for value in (rho, twin)]
        assert cf.pre_queue(1.0, twin, 1.4) == pytest.approx(1.4 / twin)
        assert share[0] < share[1]


@pytest.mark.parametrize("queue_factor", [1, 1.5, 2, 3])
def test_the_kappa_threshold_is_where_the_train_bound_side_stops_to_win(queue_factor: float) -> None:
    rhos = [0.0005 * i for i in range(1, 2_000)]

    def best_gain(kappa: float) -> float:
        return max(cf.train_bound_gain(rho, kappa, queue_factor) for rho in rhos)

    threshold = cf.kappa_threshold(queue_factor)
    assert best_gain(threshold * 0.97) > 0
    assert best_gain(threshold * 1.03) <= 1e-9


def test_the_published_kappa_thresholds() -> None:
    assert cf.kappa_threshold(1) == 0.5
    assert cf.kappa_threshold(2) == pytest.approx(0.067, abs=5e-4)


# ── admission, tokens, refusals ─────────────────────────────────────────────


def test_admission_bounds_staleness_and_costs_nothing_while_it_does_not_bind() -> None:
    free = cf.admission_limited(0.5, 8, 0.7, 1.4, 2.0)
    assert (free.pqs, free.iqs, free.train_period_ratio) == pytest.approx((0.7, 0.7, 1.0))
    bound = cf.admission_limited(2.0, 1, 0.7, 1.4, 2.0)
    assert bound.staleness == 1.0
    assert bound.train_period_ratio > 1
    assert cf.admission_limited(1.0, 3, 1.4, 1.4, 2.0).staleness == 3.0


def test_synchronous_training_waits_for_the_slowest_of_the_batch() -> None:
    sync = cf.admission_limited(1.0, 0, 0.6, 1.4, 3.0)
    assert (sync.staleness, sync.train_period_ratio) == pytest.approx((0.0, 3.6))


def test_what_a_group_waits_more_than_a_token_is_the_tail_of_its_responses() -> None:
    """Equal lengths: M = M_t = 1, and a token lies half a response before the end on average."""
    prediction = cf.queue_drop(1.0, 1, 0.5, 1.0)
    assert cf.token_staleness(prediction, 1.0, 0.5, 1.0, 0.0) == pytest.approx(0.5 + 0.5)


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("rho", lambda: cf.queue_drop(1, 1, 0, 1.4)),
        ("rho", lambda: cf.queue_drop(1, 1, math.nan, 1.4)),
        ("concurrency_ratio", lambda: cf.queue_drop(-1, 1, 1, 1.4)),
        ("queue_factor", lambda: cf.queue_drop(1, 0.5, 1, 1.4)),
        ("tailness", lambda: cf.queue_drop(1, 1, 1, 0.9)),
        ("max_staleness", lambda: cf.admission_limited(1, -1, 1, 1.4, 2)),
        ("rho", lambda: cf.train_bound_twin(1.1, 1)),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(field: str, call: object) -> None:
    with pytest.raises(InvalidField) as refused:
        call()  # type: ignore[operator]
    assert refused.value.attributes["field"] == field


# ── blocking pushes ─────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("concurrency", "queue", "micro", "rho"),
    [(64, 16, 0, 1.5), (128, 32, 0, 1.3), (128, 8, 4, 1.5), (64, 16, 4, 1.5)],
)
def test_a_queue_that_blocks_is_predicted(concurrency: int, queue: int, micro: int, rho: float) -> None:
    lengths = Lognormal.with_mean(1_000, 0.5)
    policy = RunPolicy(
        batch_groups=16, max_queued_groups=queue, micro_batch_groups=micro, overflow_action=OverflowAction.BLOCK
    )
    workload = Workload(concurrency, 8, rho, lengths)
    result = simulate(Simulation(policy=policy, workload=workload, steps=80, warmup=20))
    share = micro / 16 if micro else 1.0
    found = cf.blocking(concurrency / 128, queue / 16, rho, lengths.tailness(8), share)
    assert found.staleness == pytest.approx(result.staleness, abs=0.15)
    assert found.pqs == pytest.approx(result.pqs, abs=0.35)


def test_a_queue_that_blocks_is_that_which_drops_as_long_as_it_is_not_full() -> None:
    assert cf.blocking(1.0, 2.0, 0.7, 1.5) == cf.queue_drop(1.0, 2.0, 0.7, 1.5)
    assert cf.blocking(1.0, 0.5, 0.7, 1.5, 0.25) == cf.streaming(1.0, 0.25, 2.0, 0.7, 1.5)
