"""A run for each test."""

import re
from pathlib import Path

import pytest

from tests.support.recorded_groups import write_recorded_model


@pytest.fixture
def run_id(tmp_path: Path) -> str:
    """A run's name; the model that the recorded groups are of lies in tmp_path/model."""
    write_recorded_model(tmp_path / "model")
    return re.sub(r"[^A-Za-z0-9]+", "-", tmp_path.name)
