"""A service and a pair of real SGLang servers, each started once for a module."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine_matrix.servers import Servers, sglang_servers
from tests.engine_matrix.truth import write_version


@pytest.fixture(scope="session")
def updates() -> int:
    """Weight updates of each cell: RB_ENGINE_UPDATES."""
    return int(os.environ.get("RB_ENGINE_UPDATES", "8"))


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what servers start with."""
    return write_version(tmp_path_factory.mktemp("model") / "base", 0, 0)


@pytest.fixture(scope="module")
def servers(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Two servers without overlap scheduling, as if a cell had used them. The first test that asks waits for them."""
    with sglang_servers(tmp_path_factory.mktemp("servers"), (base, base), weight_version="1.0") as running:
        yield running
