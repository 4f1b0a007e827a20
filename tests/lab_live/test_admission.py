"""A live loop whose admission runs to the limit of its staleness: what publishes admit is begun with their weights."""

from pathlib import Path

import pytest

from bench.lab.live import SYNC, compared

STEPS, WARMUP = 25, 5
MOST_IN_VAIN = 0.2
"""Largest share of the groups. A third, where an engine begins what a publish admits before it has loaded it; 7 % in
any case.
"""


@pytest.mark.timeout(400)
def test_hardly_anything_is_generated_in_vain_while_engines_learn_of_a_publish(tmp_path: Path) -> None:
    (setting,) = [one for one in SYNC if one.name == "one_step_off"]
    found = compared(setting, tmp_path, steps=STEPS, warmup=WARMUP)
    print(found)
    assert found.live.stale_groups < MOST_IN_VAIN * (found.live.stale_groups + STEPS * setting.groups_per_batch)
    assert found.live.staleness_max <= 1
