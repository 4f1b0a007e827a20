"""Pictures are written, and show every run."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from examples.demo.plot import StepRecord, plot_run, plot_seeds


def records(n: int, first: float = 0.3) -> list[StepRecord]:
    return [StepRecord(i, min(1.0, first + i / 100), 1.5, 2, i + 1) for i in range(n)]


def colours(path: Path) -> set[tuple[int, ...]]:
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    return {tuple(pixel) for pixel in np.unique(pixels, axis=0).tolist()}


def test_a_run_becomes_a_picture(tmp_path: Path) -> None:
    plot_run(records(40), tmp_path / "out" / "reward.png", title="One run", eta=2)
    with Image.open(tmp_path / "out" / "reward.png") as image:
        assert (image.format, image.size) == ("PNG", (1200, 780))
    assert (0x0B, 0x6E, 0x99) in colours(tmp_path / "out" / "reward.png")


def test_each_seed_has_a_colour_of_its_own(tmp_path: Path) -> None:
    plot_seeds({f"seed {i}": records(40, 0.1 * i) for i in (1, 2, 3)}, tmp_path / "seeds.png", title="Three seeds")
    shown = colours(tmp_path / "seeds.png")
    assert {(0x0B, 0x6E, 0x99), (0xD1, 0x60, 0x3D), (0x5B, 0x8C, 0x3A)} <= shown


def test_one_step_is_enough(tmp_path: Path) -> None:
    plot_run(records(1), tmp_path / "reward.png", title="One step")
    assert (tmp_path / "reward.png").stat().st_size > 0


@pytest.mark.parametrize("runs", [{}, {"seed 1": [], "seed 2": records(3)}])
def test_nothing_to_plot_is_an_error(tmp_path: Path, runs: dict[str, list[StepRecord]]) -> None:
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_seeds(runs, tmp_path / "reward.png", title="")
    assert list(tmp_path.iterdir()) == []
