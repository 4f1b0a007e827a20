"""A few cells of the grid, and all published rows; the whole: bench.lab.grid and bench.lab.published."""

import statistics
from collections import Counter
from dataclasses import replace

import pytest

from bench.lab.figures import BIASES, FITTED, RUNS, Bias, Run
from bench.lab.grid import CONCURRENCY_RATIOS, QUEUE_FACTORS, RHO, TOLERANCE, Cell, grid
from bench.lab.published import TOLERANCES, beyond, bias_differences, run_differences
from buffer_service.observability.estimate.closed_forms import is_rough, small_batch_period
from buffer_service.simulator import simulate


def test_the_grid_is_the_one_that_was_asked_for() -> None:
    assert (min(RHO), max(RHO)) == (0.5, 1.5)
    assert (min(QUEUE_FACTORS), max(QUEUE_FACTORS)) == (1, 3)
    assert (min(CONCURRENCY_RATIOS), max(CONCURRENCY_RATIOS)) == (0.5, 4)
    assert len(grid()) == len(RHO) * len(QUEUE_FACTORS) * len(CONCURRENCY_RATIOS)


@pytest.mark.parametrize("rho", [0.5, 0.8, 1.3, 1.5])
@pytest.mark.parametrize("queue_factor", [1, 3])
@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_simulator_and_closed_form_agree_away_from_balance(rho: float, queue_factor: int, ratio: float) -> None:
    cell = Cell(rho, queue_factor, ratio)
    assert not is_rough(rho)
    assert simulate(cell.simulation(150)).staleness == pytest.approx(cell.closed_form(), abs=TOLERANCE)


@pytest.mark.parametrize("rho", [0.8, 0.9])
def test_batches_of_few_groups_lose_some_of_them_when_many_slots_feed_a_queue_of_one_batch(rho: float) -> None:
    """The page's form is up to 0.2 too high at C/B 4, q 1, ρ 0.8 with 16 groups a batch; the refined one is not."""
    cell = Cell(rho, 1, 4.0)
    result = simulate(replace(cell.simulation(400), warmup=300))
    assert result.staleness < cell.closed_form() - 0.1
    assert result.staleness == pytest.approx(cell.refined(), abs=TOLERANCE)
    assert result.train_period_ratio == pytest.approx(small_batch_period(16, 1, rho), abs=0.015)


def test_near_balance_only_the_simulator_predicts() -> None:
    cell = Cell(1.0, 1, 4.0)
    assert abs(simulate(cell.simulation(150)).staleness - cell.closed_form()) > TOLERANCE


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_published_runs(run: Run) -> None:
    """Within the tolerances but for the rows that are named here, each with what is beyond."""
    expected = {
        "runs: C 240 B 120 q 1 ρ 0.86 M 1.42": {"closed_form_minus_predicted", "closed_form_minus_measured"},
        "batch size: C 120 B 60 q 1 ρ 0.62 M 1.42": {"closed_form_minus_measured"},
        "concurrency: C 240 B 120 q 1 ρ 0.85 M 1.42": {
            "closed_form_minus_predicted",
            "pqs_minus_predicted",
            "closed_form_minus_measured",
        },
    }
    assert set(beyond(run_differences(run))) == expected.get(str(run), set())
    if run.concurrency < 2 * run.batch_rollouts:
        measured = TOLERANCES["simulated_minus_measured"]
        assert simulate(run.simulation(150)).staleness == pytest.approx(run.measured, abs=measured)


def test_published_runs_are_those_of_fewer_slots_in_flight() -> None:
    """One share of C for all of them gives every measured figure within 0.2 versions."""
    stated = [run for run in RUNS if "rho" not in run.assumed]
    share = statistics.mean(run.in_flight() for run in stated)
    assert 0.8 < share < 0.95
    for run in stated:
        assert run.closed_form(share).staleness == pytest.approx(run.measured, abs=0.2)


def test_every_published_table_is_here() -> None:
    counted = Counter(run.table.split(" of ")[0] for run in RUNS)
    assert counted == {"runs": 6, "batch size": 3, "queue capacity": 2, "concurrency": 2, "prompts": 4}
    assert Counter((bias.tailness, bias.policy) for bias in BIASES) == {
        (50, "queue_drop"): 2,
        (50, "queue_max"): 4,
        (90, "queue_drop"): 2,
        (90, "queue_max"): 4,
    }
    parted = [run for run in RUNS if run.predicted_pqs is not None]
    assert Counter(run.table for run in parted) == {"batch size": 3, "queue capacity": 2, "concurrency": 2}
    assert all(run.predicted_iqs is not None and run.step_s is not None for run in parted)


def test_fitted_lengths_have_the_sampled_means_and_the_longest_response() -> None:
    for bias in BIASES:
        assert FITTED[bias.tailness].mean == pytest.approx(bias.sampled_mean, rel=0.005)
        assert FITTED[bias.tailness].cap == bias.sampled_max


@pytest.mark.parametrize("bias", BIASES, ids=str)
def test_published_length_bias(bias: Bias) -> None:
    result = simulate(bias.simulation(200))
    differences = bias_differences(bias, result)
    assert "trained_share" not in beyond(differences)
    if bias.policy == "queue_drop":
        assert abs(result.length_bias) < 0.015
        assert result.trained_max_length == bias.trained_max
    else:
        assert result.length_bias < -0.015
        assert result.trained_max_length <= result.sampled_max_length == bias.sampled_max
