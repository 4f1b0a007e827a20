"""A few cells of the grid, and all published rows; the whole: bench.staleness_grid and bench.staleness_published."""

from dataclasses import replace

import pytest

from bench.staleness_grid import CONCURRENCY_RATIOS, QUEUE_FACTORS, RHO, TOLERANCE, Cell, grid
from bench.staleness_published import BIASES, FITTED, RUNS, Bias, Run
from buffer_service.staleness.closed_forms import is_rough, small_batch_period
from buffer_service.staleness.simulator import simulate


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
    """Inputs are rounded means of logged series: about 0.15 of the published prediction; measured within 0.25."""
    assert run.closed_form() == pytest.approx(run.predicted, abs=0.15)
    assert run.closed_form() == pytest.approx(run.measured, abs=0.25)
    assert simulate(run.simulation(150)).staleness == pytest.approx(run.measured, abs=0.25)


def test_fitted_lengths_have_the_sampled_means() -> None:
    assert FITTED[50].mean == pytest.approx(1_404, abs=4)
    assert FITTED[90].mean == pytest.approx(1_350, abs=4)


@pytest.mark.parametrize("bias", BIASES, ids=str)
def test_published_length_bias(bias: Bias) -> None:
    result = simulate(bias.simulation(200))
    assert 1 + result.length_bias == pytest.approx(bias.share, abs=0.05)
    if bias.max_staleness is None:
        assert abs(result.length_bias) < 0.015
    else:
        assert result.length_bias < -0.015
        assert result.trained_max_length <= result.sampled_max_length
