"""Plans: settings, levers, and splits of a budget, by brute force where that is possible."""

from dataclasses import replace

import pytest

from buffer_service.staleness import planner
from buffer_service.staleness.closed_forms import Prediction, train_bound_twin
from buffer_service.staleness.planner import Budget, Choice, Setting
from buffer_service.staleness.simulator import simulate
from buffer_wire.errors import InvalidField

SETTING = Setting(concurrency=128, groups_per_batch=16, group_size=8, rho=0.7, tailness=1.44)
BUDGET = Budget(gpus=16, rollout_tps_per_gpu=3_000, train_tps_per_gpu=9_000, mean_length=1_400)


@pytest.mark.parametrize("rho", [0.7, 1.4])
@pytest.mark.parametrize("policy", ["queue_drop", "streaming"])
def test_a_setting_is_simulated_as_it_is_predicted(policy: str, rho: float) -> None:
    setting = replace(SETTING, policy=policy, rho=rho, queue_factor=None if policy == "streaming" else 2.0)
    result = simulate(planner.simulation_of(setting, None, steps=150, warmup=40, seed=0))
    assert result.staleness == pytest.approx(planner.predict(setting).staleness, abs=0.15)
    assert result.token_staleness == pytest.approx(planner.token_staleness(setting, None), abs=0.15)
    assert result.tailness == pytest.approx(setting.tailness, rel=0.02)


def test_levers_change_one_thing_and_say_what_it_does() -> None:
    present = planner.predict(SETTING).staleness
    levers = {name: prediction.staleness - present for name, prediction in planner.levers(SETTING)}
    assert levers["twice the batch"] < 0
    assert levers["half the concurrency"] < 0
    assert levers["shorter tail, M - 1 halved"] < 0
    assert levers["streaming"] == pytest.approx(-0.7 * 7 / 8)
    assert "queue factor 1" not in levers


def test_the_frontier_is_what_no_choice_beats() -> None:
    found = planner.choices(BUDGET, SETTING, [8, 16, 32], [64, 128])
    front = planner.frontier(found)
    assert len(found) == 15 * 3 * 2

    def beaten(choice: Choice) -> bool:
        mine = (choice.prediction.staleness, choice.noise_adjusted_s)
        return any(
            other.prediction.staleness <= mine[0] + 1e-9
            and other.noise_adjusted_s <= mine[1] + 1e-9
            and (other.prediction.staleness, other.noise_adjusted_s) != mine
            for other in found
        )

    assert not any(beaten(choice) for choice in front)
    points = {(round(c.prediction.staleness, 6), round(c.noise_adjusted_s, 6)) for c in front}
    missed = [c for c in found if not beaten(c)]
    assert {(round(c.prediction.staleness, 6), round(c.noise_adjusted_s, 6)) for c in missed} == points


def test_periods_of_a_budget_are_seconds() -> None:
    (choice,) = planner.choices(replace(BUDGET, gpus=2), SETTING, [16], [128])
    assert (choice.rollout_gpus, choice.train_gpus) == (1, 1)
    assert choice.setting.rho == pytest.approx(1 / 3)
    assert choice.period_s == pytest.approx(128 * 1_400 / 3_000)
    assert choice.noise_adjusted_s == pytest.approx(choice.period_s / 128**0.5)


def test_the_recommendation_is_the_fastest_within_the_limit() -> None:
    front = planner.frontier(planner.choices(BUDGET, SETTING, [8, 16, 32], [64, 128]))
    best = planner.recommended(front, 1.5)
    assert best.prediction.staleness <= 1.5
    assert all(c.noise_adjusted_s >= best.noise_adjusted_s for c in front if c.prediction.staleness <= 1.5)
    assert planner.recommended(front, 0.0) == min(front, key=lambda c: c.prediction.staleness)


def test_near_balance_a_choice_asks_to_be_simulated_once() -> None:
    choices = planner.choices(BUDGET, SETTING, [16], [128])
    (balanced,) = [choice for choice in choices if choice.rollout_gpus == 12]
    assert balanced.needs_simulation
    settled = planner.settled(balanced, Prediction(1.0, 0.9, 1.25))
    assert not settled.needs_simulation
    assert settled.period_s == pytest.approx(1.25 * balanced.period_s)


def test_cheap_rollouts_make_the_train_bound_side_win_and_the_plan_says_where() -> None:
    cheap = replace(BUDGET, train_tps_per_gpu=900)
    assert "less stale than train-bound" in planner.side_in_words(BUDGET, 1)
    assert "the train-bound side wins" in planner.side_in_words(cheap, 1)
    # κ = 0.3: at the twin of ρ = 0.85 staleness is lower for the same period, as the simulator agrees.
    twin = train_bound_twin(0.85, cheap.kappa)
    both = [replace(SETTING, rho=rho, concurrency=c) for rho, c in ((0.85, 128), (twin, round(128 * twin)))]
    ours, theirs = (simulate(planner.simulation_of(s, None, steps=150, warmup=40, seed=0)).staleness for s in both)
    assert theirs < ours


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("policy", lambda: planner.predict(replace(SETTING, policy="queue_max"))),
        ("tailness", lambda: replace(SETTING, tailness=9.0)),
        ("concurrency", lambda: replace(SETTING, concurrency=0)),
        ("gpus", lambda: replace(BUDGET, gpus=1)),
        ("train_tps_per_gpu", lambda: replace(BUDGET, train_tps_per_gpu=0)),
        ("rho", lambda: planner.predict(replace(SETTING, rho=-1.0))),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(field: str, make: object) -> None:
    with pytest.raises(InvalidField) as refused:
        make()  # type: ignore[operator]
    assert refused.value.attributes["field"] == field
