"""Every pause mode with every way that weights take, on two real engines under load."""

from pathlib import Path

import pytest

from tests.engine_matrix import results
from tests.engine_matrix.cell import Cell, check_cell, run_cell
from tests.engine_matrix.kinds import KINDS
from tests.engine_matrix.servers import Servers
from tests.support.service import ServiceProcess

MODES = ("retract", "in_place", "abort")

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3_600)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_every_token_names_its_weights_and_none_is_lost(
    mode: str, kind: str, updates: int, servers: Servers, service: ServiceProcess, tmp_path: Path
) -> None:
    cell = Cell(mode, kind, updates, salt=20 * (MODES.index(mode) * len(KINDS) + KINDS.index(kind)))
    outcome = run_cell(cell, tmp_path, service.address, servers.urls)
    results.note(outcome, overlap=False)
    check_cell(outcome)
    assert outcome.seen.mislabelled == 0
