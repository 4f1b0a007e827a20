"""Order, resumption and statistics of the command that measures what staleness costs in reward, and its losses."""

import fcntl
import json
import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.reward import curves, page, turns
from bench.reward.cells import LOSSES, POLICIES, SYNCHRONOUS, Cell, Results, cell_of, cells
from bench.reward.learner import LOSSES as LOSS_FUNCTIONS
from bench.reward.learner import Samples

SETTING = {"steps": 4, "train_s": 0.4}


def row(
    policy: str = SYNCHRONOUS, loss: str = "AIPO", seed: int = 1, *, last: float = 0.6, s: float = 1.0
) -> dict[str, Any]:
    return {
        **Cell(policy, loss, seed)._asdict(),
        "reward": [0.3, 0.3, 0.4, 0.5, last],
        "at_s": [0.0, s, 2 * s, 3 * s, 4 * s],
        "staleness": [0.0, 1.0, 2.0, 2.0],
        "log_ratio": [0.0, 0.1, 0.125, 0.125],
        "staleness_max": 2,
        "cpu_s": {"engine": 3.0, "trainer": 2.0},
    }


def results(folder: Path, **setting: object) -> Results:
    return Results(folder / "reward.json", {**SETTING, **setting})


def test_a_part_of_the_cells_is_balanced() -> None:
    order = cells()
    assert len(order) == len(set(order)) == len(POLICIES) * len(LOSSES) * 3
    for done in range(0, len(order), 5):
        seeds = {(policy, loss): 0 for policy in POLICIES for loss in LOSSES}
        for cell in order[:done]:
            seeds[cell.policy, cell.loss] += 1
        assert max(seeds.values()) - min(seeds.values()) <= 1


def test_what_has_a_result_is_not_run_again(tmp_path: Path) -> None:
    kept = results(tmp_path)
    order = cells()
    assert kept.left(order) == order
    for cell in (order[2], order[0]):
        kept.add(row(*cell))
    again = results(tmp_path)
    assert again.left(order) == [order[1], *order[3:]]
    # As the order of the cells has them, one a line: what comes later changes no other line.
    assert [cell_of(each) for each in again.rows()] == [order[0], order[2]]
    assert sum('"policy"' in line for line in kept.path.read_text().splitlines()) == 2
    with pytest.raises(ValueError, match="already"):
        again.add(row(*order[0]))


def test_results_of_another_setting_are_not_mixed(tmp_path: Path) -> None:
    results(tmp_path).add(row())
    with pytest.raises(ValueError, match="another setting"):
        results(tmp_path, steps=5).rows()


def test_the_reward_at_a_time_is_that_of_the_weights_published_by_then() -> None:
    seconds = np.asarray([0.0, 0.99, 1.0, 3.5])
    assert curves.by_time(row(), seconds).tolist() == [0.3, 0.3, 0.3, 0.5]
    assert curves.by_step(row(), np.asarray([0.0, 3.0])).tolist() == [0.3, 0.5]
    assert curves.shared_s([row(), row(s=0.5)]) == 2.0


def test_intervals_pool_the_spread_of_all_policies() -> None:
    values = {
        "a": {1: np.asarray([0.0]), 2: np.asarray([2.0]), 3: np.asarray([4.0])},
        "b": {1: np.asarray([5.0]), 2: np.asarray([5.0])},
        "c": {1: np.asarray([7.0])},
    }
    found = curves.curves(values)
    assert {policy: curve.mean[0] for policy, curve in found.items()} == {"a": 2.0, "b": 5.0, "c": 7.0}
    # Squares 8 around a, none around b: over 3 degrees of freedom.
    spread = math.sqrt(8 / 3)
    for policy, seeds in (("a", 3), ("b", 2), ("c", 1)):
        assert found[policy].half[0] == pytest.approx(3.182 * spread / math.sqrt(seeds), rel=0.01)


def test_no_interval_without_a_known_spread() -> None:
    one_seed = curves.curves({"a": {1: np.asarray([1.0])}, "b": {1: np.asarray([2.0])}})
    assert math.isnan(one_seed["a"].half[0])


@pytest.mark.parametrize(("degrees", "tabulated"), [(3, 3.182), (4, 2.776), (10, 2.228), (60, 2.000)])
def test_t_is_that_of_the_tables(degrees: int, tabulated: float) -> None:
    assert curves.t_quantile(degrees) == pytest.approx(tabulated, rel=0.01)


def test_differences_are_taken_seed_by_seed() -> None:
    values = {
        SYNCHRONOUS: {1: np.asarray([0.5]), 2: np.asarray([0.9])},
        "η 2": {1: np.asarray([0.4]), 2: np.asarray([0.8]), 3: np.asarray([0.1])},
        "η 4": {3: np.asarray([0.1])},
    }
    found = curves.against_synchronous(values)
    assert set(found) == {"η 2"}
    assert {seed: round(value[0], 9) for seed, value in found["η 2"].items()} == {1: -0.1, 2: -0.1}


def test_the_table_says_how_many_seeds_there_are(tmp_path: Path) -> None:
    rows = [row(), row(seed=2), row("η 2", last=0.5), row("η 2", "TIS", s=0.5)]
    table = page.lines(rows)
    assert table[0].startswith("| policy | seeds | staleness: mean, max |")
    assert len({line.count("|") for line in table}) == 1
    assert "AIPO, 4 steps" in table[0]
    assert "AIPO, 2 s" in table[0]
    assert table[2].startswith(f"| {SYNCHRONOUS} | 0 to 2 | 2.00, 2 | 0.125 | 1.00 | 5 | 0.600 |")
    assert "| η 2 | 0 to 1 | 2.00, 2 | 0.125 | 0.75 | 5 | −0.100 |" in table[3]
    page.picture(rows, tmp_path / "reward.png")
    assert (tmp_path / "reward.png").stat().st_size > 10_000


def test_without_staleness_the_losses_pull_the_same_way_and_with_it_they_differ() -> None:
    torch.manual_seed(0)
    new = torch.randn(4, 6) - 2
    mask = torch.ones(4, 6, dtype=torch.bool)
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])

    def gradients(behaviour: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {}
        for name, loss in LOSS_FUNCTIONS.items():
            logprobs = new.clone().requires_grad_()
            samples = Samples(torch.zeros(4, 6, dtype=torch.int64), mask, behaviour, new, advantages)
            loss(logprobs, samples).backward()  # type: ignore[no-untyped-call]
            assert logprobs.grad is not None
            found[name] = logprobs.grad
        return found

    fresh = gradients(new)
    assert set(fresh) == set(LOSSES)
    for gradient in fresh.values():
        torch.testing.assert_close(gradient, fresh["AIPO"])
    stale = gradients(new + 1.5 * torch.randn(4, 6))
    names = list(stale)
    assert all(
        not torch.allclose(stale[one], stale[other]) for at, one in enumerate(names) for other in names[at + 1 :]
    )


def test_a_turn_that_is_over_is_passed_on_between_two_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, lock, got = [0.0], tmp_path / "lock", threading.Event()

    def other() -> None:
        with lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            got.set()

    monkeypatch.setattr(turns, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: got.wait(timeout=30)))
    with turns.Turns(lock, longest_s=100.0) as held:
        waiting = threading.Thread(target=other)
        waiting.start()
        now[0] = 60.0
        held.next(expected_s=30.0)
        assert not got.is_set()
        held.next(expected_s=50.0)
        assert got.is_set()
        waiting.join()
        with lock.open("a") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_results_in_the_project_have_the_setting_of_the_command() -> None:
    path = Path(page.__file__).parents[1] / "results" / "reward.json"
    written = json.loads(path.read_text())
    done = [cell_of(each) for each in written["rows"]]
    assert len(done) == len(set(done))
    assert set(done) <= set(cells())
    assert all(len(each["reward"]) == written["setting"]["steps"] + 1 for each in written["rows"])
