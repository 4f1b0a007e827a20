"""Tests of live runs as the simulator plays them: what is asked of what was measured, and how near the answer is."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from buffer_service.domain.policy import EnvironmentRule, OverflowAction, RunPolicy, StaleAction
from buffer_service.domain.presets import fields_of
from buffer_service.observability.estimate import estimate
from buffer_service.observability.estimate.questions import MOST_GROUPS, Played, Question
from buffer_service.observability.estimate.simulated import answer
from buffer_service.simulator import Simulation, Workload
from buffer_service.simulator.lengths import Lognormal
from tests.support.simulated_views import simulated_view
from tests.support.views import make_loop

N, GROUP_SIZE = 8, 4
LENGTHS = Lognormal.with_mean(1_000.0, 0.6)


def now(_run_id: str, asked: Question) -> tuple[Played | None, bool]:
    return answer(asked), False


class Asked:
    """Keeps the question."""

    def __call__(self, _run_id: str, asked: Question) -> tuple[Played | None, bool]:
        self.question = asked
        return None, True


def asked_of(view: Any) -> Question:
    play = Asked()
    estimate(view, play)
    return play.question


def policy(preset: str, **fields: Any) -> RunPolicy:
    return RunPolicy(**{"batch_groups": N, **fields_of(preset, N), **fields})


@pytest.mark.parametrize(
    ("chosen", "workload"),
    [
        pytest.param(policy("queue_drop(2)"), {"rho": 0.95}, id="near balance"),
        pytest.param(policy("queue_drop(1)"), {"rho": 0.7, "publish_lag": 400.0}, id="late loads"),
        pytest.param(policy("queue_drop(1)"), {"rho": 0.8, "reload_pause": 500.0}, id="decoding stands still"),
        pytest.param(policy("areal(1)", max_inflight_groups=0), {"rho": 0.6}, id="admission holds back"),
        pytest.param(policy("one_step_off"), {"rho": 1.3, "publish_lag": 50.0}, id="fresh starts"),
        pytest.param(policy("queue_max(2)"), {"rho": 1.2}, id="a gate"),
        pytest.param(
            policy("queue_drop(1)", overflow_action=OverflowAction.BLOCK),
            {"rho": 1.4, "groups_in_flight": 16, "groups_outstanding": 32},
            id="pushes are blocked",
        ),
        pytest.param(
            policy("queue_drop(1)", overflow_action=OverflowAction.REJECT),
            {"rho": 1.4, "groups_in_flight": 16, "groups_outstanding": 32},
            id="pushes are rejected",
        ),
    ],
)
def test_a_simulated_run_is_predicted_from_what_is_measured_of_it(chosen: RunPolicy, workload: dict[str, Any]) -> None:
    work = Workload(**{"concurrency": 32, "group_size": GROUP_SIZE, "lengths": LENGTHS, **workload})
    view, result = simulated_view(Simulation(policy=chosen, workload=work, steps=300, warmup=40, seed=7))
    predicted = estimate(view, now).predicted
    assert predicted.simulated
    assert predicted.staleness == pytest.approx(result.staleness, abs=0.12)
    assert predicted.pre_queue == pytest.approx(result.pqs, abs=0.15)


def test_what_a_trainer_waits_for_its_calls_lengthens_its_step() -> None:
    """A third of a step's time are calls, while the queue is full: pulls of micro-batches, say."""
    chosen = policy("streaming(1)")
    work = Workload(concurrency=32, group_size=GROUP_SIZE, lengths=LENGTHS, rho=1.5)
    view, result = simulated_view(Simulation(policy=chosen, workload=work, steps=300, warmup=40, seed=7))
    assert view.window is not None
    busy = view.window.grown("trainer_busy_ms")
    totals = {**view.window.last.totals, "trainer_busy_ms": 2 * busy // 3, "trainer_wait_ms": busy // 3}
    waits = replace(view, window=replace(view.window, last=replace(view.window.last, totals=totals)))
    assert estimate(waits, now).predicted.staleness == pytest.approx(result.staleness, abs=0.12)


def test_until_it_is_simulated_the_closed_form_stands_there() -> None:
    view = make_loop(rho=1.0)
    waiting, plain = estimate(view, Asked()).predicted, estimate(view).predicted
    assert waiting == replace(plain, pending=True)
    assert (plain.rough, estimate(view, now).predicted.rough) == (True, False)


def test_what_is_asked_hardly_depends_on_the_window() -> None:
    first = asked_of(make_loop(rho=0.7))
    assert first == asked_of(make_loop(rho=0.7 * 0.999))
    assert first != asked_of(make_loop(rho=0.75))


def test_times_are_those_of_a_mean_response() -> None:
    """1,000 tokens at 100 tokens/s; a batch of 128 samples takes 128 requests that time, and the trainer 7/10 of it."""
    reload_counters = (20, 20_000, 0, 0, 0, 0, 0, 0, 20, 40_000, 20, 1_000)
    asked = asked_of(make_loop(rho=0.7))
    assert (asked.group_size, asked.lag, asked.pause) == (8, 0.0, 0.0)
    assert asked.step == pytest.approx(0.7, rel=0.01)
    assert asked.concurrency == pytest.approx(128, rel=0.01)
    # Of a period of 10 s engines pause for 2.05: what a request takes while they decode is as much less.
    slower = asked_of(make_loop(rho=0.7, reload_counters=reload_counters))
    response_s = 10 * (1 - 0.205)
    assert slower.lag == pytest.approx(1.0 / response_s, rel=0.01)
    assert slower.pause == pytest.approx(2.05 / response_s, rel=0.01)
    assert slower.step == pytest.approx(7 / response_s, rel=0.01)


def test_a_large_batch_is_played_smaller() -> None:
    asked = asked_of(make_loop(RunPolicy(batch_groups=16 * MOST_GROUPS, max_queued_groups=32 * MOST_GROUPS), rho=0.7))
    assert (asked.policy.batch_groups, asked.policy.max_queued_groups) == (MOST_GROUPS, 2 * MOST_GROUPS)


def test_a_batch_that_is_played_smaller_leaves_the_queue_its_room_for_all_that_is_admitted() -> None:
    """Rounded each for itself, 33 groups of 40 would be 26, and 99 queued ones 77: one fewer than waiting needs."""
    chosen = RunPolicy(
        batch_groups=33, stale_action=StaleAction.WAIT, max_staleness=2, max_lookahead=2, max_queued_groups=99
    )
    asked = asked_of(make_loop(chosen, grown={"accepted_groups": 660, "accepted_samples": 660 * 40}))
    assert (asked.group_size, asked.policy.batch_groups, asked.policy.max_queued_groups) == (40, 26, 78)


def test_what_the_simulator_has_no_answer_to_is_left_out() -> None:
    chosen = RunPolicy(
        batch_groups=16,
        max_queued_tokens=10**6,
        quota_groups=100,
        cancel_stale_leases=True,
        max_staleness=4,
        environments=(EnvironmentRule(environment="math"),),
    )
    predicted = estimate(make_loop(chosen), now).predicted
    assert predicted.simulated
    assert "simulated without cancel_stale_leases and environments" in predicted.notes


def test_a_process_answers_one_after_another() -> None:
    questions = [asked_of(make_loop(rho=rho)) for rho in (0.7, 1.0)]
    command = [sys.executable, "-m", "buffer_service.observability.estimate"]
    lines = "".join(f"{one.to_json()}\n" for one in questions)
    done = subprocess.run(command, input=lines, capture_output=True, check=True, text=True)
    assert [Played.from_json(line) for line in done.stdout.splitlines()] == [answer(one) for one in questions]
