"""The model that engines start with."""

from pathlib import Path

import pytest

from tests.engine_matrix.truth import write_version


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_version(tmp_path_factory.mktemp("model") / "base", 0, 0)
