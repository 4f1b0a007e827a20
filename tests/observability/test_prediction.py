"""Tests of which closed form a run's policy gets, and whether it predicts runs that were simulated."""

from dataclasses import replace
from typing import Any

import pytest

from buffer_service.domain.policy import Order, OverflowAction, RunPolicy, StalenessMeasure
from buffer_service.domain.presets import fields_of
from buffer_service.observability.estimate import closed_forms as cf
from buffer_service.observability.estimate import estimate
from buffer_service.simulator import Simulation, Workload
from buffer_service.simulator.lengths import Lognormal
from tests.support.simulated_views import simulated_view
from tests.support.views import make_loop

N = 16


def policy(**fields: Any) -> RunPolicy:
    return RunPolicy(batch_groups=N, **fields)


@pytest.mark.parametrize(
    ("chosen", "rho", "form", "expected"),
    [
        (policy(), 0.7, "queue-drop, whole batches", cf.queue_drop(1, 1, 0.7, 1.5)),
        (policy(max_queued_groups=32), 1.5, "queue-drop, whole batches", cf.queue_drop(1, 2, 1.5, 1.5)),
        (policy(max_queued_groups=32, order=Order.LIFO), 1.5, "queue-drop, whole", cf.queue_drop(1, 1, 1.5, 1.5)),
        (
            policy(micro_batch_groups=4, max_queued_groups=8),
            1.5,
            "queue-drop, micro-batches of 4",
            cf.streaming(1, 1 / 4, 2, 1.5, 1.5),
        ),
        (policy(batches_per_publish=2), 1.5, "queue-drop, whole batches, 2", cf.streaming(1 / 2, 1 / 2, 1, 1.5, 1.5)),
        (policy(overflow_action=OverflowAction.BLOCK), 1.5, "blocking, whole batches", cf.blocking(1, 1, 1.5, 1.5)),
        (
            policy(**fields_of("areal(1)", N)),
            0.7,
            "admission, 1 version ahead",
            cf.admission_limited(1, 1, 0.7, 1.5, 1.5),
        ),
    ],
)
def test_the_form_is_that_of_the_policy(chosen: RunPolicy, rho: float, form: str, expected: cf.Prediction) -> None:
    found = estimate(make_loop(chosen, rho=rho)).predicted
    assert found.form.startswith(form)
    assert (found.pre_queue, found.in_queue) == pytest.approx((expected.pqs, expected.iqs), abs=0.01)
    assert found.staleness == pytest.approx(expected.staleness, abs=0.02)


def test_admission_beyond_what_the_queue_has_room_for_is_that_of_the_queue() -> None:
    """Eight versions ahead, and a queue of one batch that drops what is older."""
    assert estimate(make_loop(policy(max_lookahead=8), rho=1.5)).predicted.form == "queue-drop, whole batches"
    assert estimate(make_loop(policy(max_lookahead=1), rho=1.5)).predicted.form.startswith("admission")


def test_micro_batches_are_those_of_all_ranks() -> None:
    streamed = policy(micro_batch_groups=2, max_queued_groups=8)
    assert "micro-batches of 4 groups" in estimate(make_loop(streamed, world_size=2)).predicted.form


def test_batches_that_are_pulled_ahead_wait_at_the_trainer_when_it_is_the_bottleneck() -> None:
    plain, ahead = (estimate(make_loop(policy(prefetch_batches=d), rho=1.5)).predicted for d in (0, 2))
    assert ahead.in_queue == pytest.approx((plain.in_queue or 0) + 2)
    plain, ahead = (estimate(make_loop(policy(prefetch_batches=d), rho=0.7)).predicted for d in (0, 2))
    assert ahead.in_queue == plain.in_queue


def test_versions_that_rise_by_two_count_twice() -> None:
    view = make_loop()
    assert view.window is not None
    last = replace(view.window.last, version=view.window.first.version + 40)
    twice = estimate(replace(view, window=replace(view.window, last=last))).predicted
    assert twice.staleness == pytest.approx(2 * (estimate(view).predicted.staleness or 0))


def test_a_version_for_every_third_of_a_batch_makes_three_times_as_many_pass() -> None:
    often = make_loop(publishes=60, grown={"assembled_groups": 20 * N})
    assert estimate(often).quantities.batches_per_publish == pytest.approx(1 / 3)
    assert estimate(often).predicted.staleness == pytest.approx(3 * (estimate(make_loop()).predicted.staleness or 0))


def test_a_gate_bounds_what_is_predicted_and_only_by_the_head() -> None:
    gated = estimate(make_loop(policy(max_queued_groups=160, max_staleness=2), rho=1.5)).predicted
    assert gated.staleness == 2
    assert "prefers short responses" in gated.notes[-1]
    by_tail = policy(max_queued_groups=160, max_staleness=2, staleness_measure=StalenessMeasure.TAIL)
    free = estimate(make_loop(by_tail, rho=1.5)).predicted
    assert (free.staleness or 0) > 5
    assert any("goes by the tail version" in note for note in free.notes)


@pytest.mark.parametrize(("rho", "rough"), [(0.79, False), (0.81, True), (1.19, True), (1.21, False)])
def test_near_balance_it_is_said_to_be_rough(rho: float, rough: bool) -> None:
    found = estimate(make_loop(rho=rho)).predicted
    assert found.rough is rough
    assert any("closed form is rough" in note for note in found.notes) is rough


def test_what_rejects_has_no_closed_form_when_training_is_the_bottleneck() -> None:
    rejects = policy(overflow_action=OverflowAction.REJECT)
    found = estimate(make_loop(rejects, rho=1.5))
    assert found.predicted.staleness is None
    assert found.unknown[-1].reason.startswith("overflow_action reject")
    assert estimate(make_loop(rejects, rho=0.7)).predicted.staleness is not None


# ── against the simulator ────────────────────────────────────────────────────

LENGTHS = Lognormal.with_mean(1_000, 0.5)


@pytest.mark.parametrize(
    ("chosen", "rho"),
    [
        (policy(), 0.6),
        (policy(max_queued_groups=32), 1.5),
        (policy(micro_batch_groups=2, max_queued_groups=4), 0.6),
        (policy(micro_batch_groups=2, max_queued_groups=4), 1.5),
        (policy(prefetch_batches=1), 1.5),
        (policy(batches_per_publish=2), 1.5),
        (policy(max_lookahead=8), 1.5),
    ],
)
def test_what_was_simulated_is_predicted(chosen: RunPolicy, rho: float) -> None:
    workload = Workload(N * 8, 8, rho, LENGTHS)
    view, result = simulated_view(Simulation(policy=chosen, workload=workload, steps=60, warmup=15))
    found = estimate(view)
    assert found.quantities.rho == pytest.approx(rho, rel=0.03)
    assert found.quantities.concurrency_ratio == pytest.approx(1 / chosen.batches_per_publish, rel=0.03)
    assert found.predicted.staleness == pytest.approx(result.staleness, abs=0.15)
    assert found.measured.staleness == pytest.approx(result.staleness, abs=0.01)
    assert found.measured.tokens == pytest.approx(result.token_staleness, abs=0.01)
    assert not any("off the predicted" in sentence for sentence in found.verdict.sentences)
    assert not any(one.biased for one in found.bias.comparisons)


def test_a_trainer_that_never_waits_tells_what_waiting_pushes_hide() -> None:
    """Engines wait for room, so that ρ of 1.5 is measured as 1: the form is that of a full queue, less exact."""
    chosen = policy(overflow_action=OverflowAction.BLOCK)
    workload = Workload(N * 4, 8, 1.5, LENGTHS)
    view, result = simulated_view(Simulation(policy=chosen, workload=workload, steps=60, warmup=15))
    found = estimate(view)
    assert found.quantities.rho == pytest.approx(1, abs=0.05)
    assert found.verdict.bound == "train"
    assert "hide by how much" in found.verdict.sentences[0]
    assert found.predicted.staleness == pytest.approx(result.staleness, abs=1 - 1 / 1.5 + 0.1)
