"""A live loop, real but for the model, has the simulator's staleness: four settings, whole batches and streamed
micro-batches.

A run that the machine disturbs (its sleeps took too long) is made once more. `pytest -s` shows the figures.
"""

from pathlib import Path

import pytest

from bench.lab.live import AGREEMENT, TOLERANCE, compared
from bench.live_loop.setting import Setting

STEPS, WARMUP = 40, 10
LEAST_STANDARD_ERRORS = 4
"""The tolerance has to be so many of them, or agreement would be luck."""


@pytest.mark.timeout(400)
@pytest.mark.parametrize("setting", AGREEMENT, ids=lambda setting: setting.name.replace(", ", "-").replace(" ", "_"))
def test_a_live_loop_is_as_stale_as_the_simulator_says(setting: Setting, tmp_path: Path) -> None:
    found = compared(setting, tmp_path / "first", steps=STEPS, warmup=WARMUP)
    if found.live.disturbed:
        print(f"again: {found}")
        found = compared(setting, tmp_path / "again", steps=STEPS, warmup=WARMUP)
    print(found)
    assert found.live.staleness == found.live.staleness_of_pulled == pytest.approx(found.live.pqs + found.live.iqs)
    assert found.simulated.standard_error * LEAST_STANDARD_ERRORS < TOLERANCE
    assert abs(found.difference) < TOLERANCE, str(found)
