"""Programs that the chart's scripts find in the image."""

import os
import shutil
from pathlib import Path

import pytest

from buffer_service.store.embedded.binary import find_binary
from tests.chart.helm import missing


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with valkey-server and valkey-cli, as the image has them."""
    command_line = shutil.which("valkey-cli") or shutil.which("redis-cli")
    if command_line is None:
        missing("there is no valkey-cli or redis-cli on PATH (Debian and Ubuntu: redis-tools)")
    folder = tmp_path_factory.mktemp("bin")
    (folder / "valkey-server").symlink_to(find_binary(os.environ.get("RB_TEST_STORE_BINARY")))
    (folder / "valkey-cli").symlink_to(command_line)
    return folder
