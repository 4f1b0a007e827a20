"""Plans: settings, levers, and splits of a budget, by brute force where that is possible."""

from dataclasses import replace

import pytest

from buffer_service.observability.estimate.closed_forms import Prediction, train_bound_gain, train_bound_twin
from buffer_service.simulator import simulate
from buffer_wire.errors import InvalidField
from rollout_lab import planner
from rollout_lab.planner import Budget, Choice, Setting, Slots

SETTING = Setting(concurrency=128, groups_per_batch=16, group_size=8, rho=0.7, tailness=1.44)
BUDGET = Budget(gpus=16, rollout_tps_per_gpu=3_000, train_tps_per_gpu=9_000, mean_length=1_400)
PER_GPU = Slots(planner.slots_per_gpu(BUDGET, 128))
IN_ALL = Slots(128, per_gpu=False)


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
    found = planner.choices(BUDGET, SETTING, [8, 16, 32], [PER_GPU, IN_ALL])
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
    (choice,) = planner.choices(replace(BUDGET, gpus=2), SETTING, [16], [IN_ALL])
    assert (choice.rollout_gpus, choice.train_gpus) == (1, 1)
    assert choice.setting.rho == pytest.approx(1 / 3)
    assert choice.period_s == pytest.approx(128 * 1_400 / 3_000)
    assert choice.noise_adjusted_s == pytest.approx(choice.period_s / 128**0.5)


def test_the_recommendation_is_the_fastest_within_the_limit() -> None:
    front = planner.frontier(planner.choices(BUDGET, SETTING, [8, 16, 32], [PER_GPU, IN_ALL]))
    best = planner.recommended(front, 1.5)
    assert best.prediction.staleness <= 1.5
    assert all(c.noise_adjusted_s >= best.noise_adjusted_s for c in front if c.prediction.staleness <= 1.5)
    assert planner.recommended(front, 0.0) == min(front, key=lambda c: c.prediction.staleness)


def test_near_balance_a_choice_asks_to_be_simulated_once() -> None:
    choices = planner.choices(BUDGET, SETTING, [16], [IN_ALL])
    (balanced,) = [choice for choice in choices if choice.rollout_gpus == 12]
    assert balanced.needs_simulation
    settled = planner.settled(balanced, Prediction(1.0, 0.9, 1.25))
    assert not settled.needs_simulation
    assert settled.period_s == pytest.approx(1.25 * balanced.period_s)


def test_every_rollout_gpu_has_the_same_slots_whatever_the_split() -> None:
    """Example: with 12 + 4 balanced, 128 slots there are 85 of 8 + 8, which has 1.29 versions at 7.47 s."""
    splits = {choice.rollout_gpus: choice for choice in planner.choices(BUDGET, SETTING, [16], [PER_GPU])}
    assert {gpus: split.setting.concurrency for gpus, split in splits.items() if gpus in {3, 8, 12}} == {
        3: 32,
        8: 85,
        12: 128,
    }
    assert splits[8].prediction.staleness == pytest.approx(1.29, abs=0.005)
    assert splits[8].period_s == pytest.approx(7.47, abs=0.005)
    assert splits[14].prediction.staleness > splits[8].prediction.staleness


@pytest.mark.parametrize("kappa", [0.05, 0.3, 0.6, 3.0])
@pytest.mark.parametrize("queue_factor", [1.0, 2.0])
@pytest.mark.parametrize("per_gpu", [True, False])
def test_the_less_stale_side_is_that_of_the_splits_themselves(per_gpu: bool, queue_factor: float, kappa: float) -> None:
    budget = replace(BUDGET, gpus=1_000, train_tps_per_gpu=3_000 * kappa)
    slots = Slots(planner.slots_per_gpu(budget, 1_280) if per_gpu else 1_280, per_gpu)
    setting = replace(SETTING, queue_factor=queue_factor, groups_per_batch=160)
    wins = planner.train_bound_wins(budget, setting, slots)
    if per_gpu:
        # PQS is the same on both sides then, so the gain is that of IQS alone.
        steps = [step / 200 for step in range(1, 200)]
        gains = [rho for rho in steps if train_bound_gain(rho, kappa, queue_factor) > 1e-9]
        assert wins == ([(min(gains), max(gains))] if gains else [])
    splits = planner.choices(budget, setting, [160], [slots])
    above = [split for split in splits if split.setting.rho > 1]
    for split in splits:
        rho = split.setting.rho
        if rho > 1 or any(abs(rho - end) < 0.01 for ends in wins for end in ends):
            continue
        twin = min(above, key=lambda other: abs(other.period_s - split.period_s))
        gain = split.prediction.staleness - twin.prediction.staleness
        # Twins of whole GPUs have nearly the same period only, and whole slots.
        if abs(twin.period_s / split.period_s - 1) < 0.003 and abs(gain) > 0.05:
            assert (gain > 0) is any(low < rho < high for low, high in wins)


def test_the_sentence_says_where_the_train_bound_side_is_less_stale() -> None:
    assert "rollout-bound one (ρ < 1) is less stale" in planner.side_in_words([], PER_GPU)
    assert planner.side_in_words([], PER_GPU) != planner.side_in_words([], IN_ALL)
    assert "one (ρ > 1) is less stale where the rollout-bound one has ρ between 0.01 and 0.47" in (
        planner.side_in_words([(0.005, 0.47)], IN_ALL)
    )
    assert planner.side_in_words([(0.005, 0.995)], IN_ALL).endswith("the train-bound one (ρ > 1) is less stale")


def test_where_rollouts_are_cheap_the_simulator_too_has_the_train_bound_side_less_stale() -> None:
    twin = train_bound_twin(0.85, 0.3)
    both = [replace(SETTING, rho=rho, concurrency=c) for rho, c in ((0.85, 128), (twin, round(128 * twin)))]
    ours, theirs = (simulate(planner.simulation_of(s, None, steps=150, warmup=40, seed=0)).staleness for s in both)
    assert theirs < ours


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("policy", lambda: planner.predict(replace(SETTING, policy="queue_max"))),
        ("tailness", lambda: replace(SETTING, tailness=9.0)),
        ("concurrency", lambda: replace(SETTING, concurrency=0)),
        ("concurrencies", lambda: Slots(0.0)),
        ("gpus", lambda: replace(BUDGET, gpus=1)),
        ("train_tps_per_gpu", lambda: replace(BUDGET, train_tps_per_gpu=0)),
        ("rho", lambda: planner.predict(replace(SETTING, rho=-1.0))),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(field: str, make: object) -> None:
    with pytest.raises(InvalidField) as refused:
        make()  # type: ignore[operator]
    assert refused.value.attributes["field"] == field
