"""Engines with overlap scheduling, SGLang's default: versions are right within the documented bound.

The bound: an in_place update may credit one token of the old weights to the new version, per sample; the other modes
are exact. On two cores overlap scheduling costs a factor of ten, hence the smaller load.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine_matrix import results
from tests.engine_matrix.cell import Cell, Load, check_cell, run_cell
from tests.engine_matrix.servers import Servers, sglang_servers
from tests.engine_matrix.test_modes_and_kinds import MODES
from tests.support.service import ServiceProcess

LIGHT = Load(group_size=2, groups_per_engine=2, lengths=(20, 70, 40, 60))

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3_600)]


@pytest.fixture(scope="module")
def overlapping(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("overlapping")
    with sglang_servers(folder, (base, base), weight_version="1.0", overlap=True) as running:
        yield running


@pytest.mark.parametrize("mode", MODES)
def test_versions_are_right_within_the_bound_of_overlap_scheduling(
    mode: str, updates: int, overlapping: Servers, service: ServiceProcess, tmp_path: Path
) -> None:
    cell = Cell(mode, "path", max(updates // 4, 2), 20 * MODES.index(mode), LIGHT)
    outcome = run_cell(cell, tmp_path, service.address, overlapping.urls)
    results.note(outcome, overlap=True)
    check_cell(outcome)
    seen = outcome.seen
    if mode == "in_place":
        # One token of each update at most: the first that is said to be of the new weights was made by those before.
        assert seen.elsewhere == 0, seen.wrong
        assert all(made == claimed - 1 for claimed, made in seen.wrong), seen.wrong
    else:
        assert seen.mislabelled == 0
