"""deploy/sglang-cpu/install.sh: what it refuses, and what it says. The install itself is what `engine` tests run on."""

import os
import subprocess
from pathlib import Path

INSTALL = Path(__file__).parents[2] / "deploy/sglang-cpu/install.sh"


def install(*arguments: str | Path, **environment: str) -> tuple[int, str]:
    """Exit code and what it printed; no package index can be reached."""
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        [INSTALL, *arguments],
        check=False,
        env=os.environ | offline | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stderr


def test_without_a_directory_it_says_how_it_is_used() -> None:
    code, printed = install()
    assert code != 0
    assert "usage: install.sh VENV_DIR" in printed


def test_a_missing_interpreter_is_named(tmp_path: Path) -> None:
    code, printed = install(tmp_path / "venv", PYTHON="no-such-python")
    assert code == 1
    assert "no interpreter 'no-such-python'; set PYTHON" in printed
    assert not (tmp_path / "venv").exists()


def test_a_directory_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    code, printed = install(tmp_path)
    assert code == 1
    assert "is no virtual environment; it is left alone" in printed
    assert (tmp_path / "precious").read_text() == "data"


def test_a_failed_install_says_why_and_is_not_taken_for_a_finished_one(tmp_path: Path) -> None:
    for _ in range(2):
        code, printed = install(tmp_path / "venv")
        assert code == 1
        assert "pip failed for engine:" in printed
        assert "No matching distribution found for torch==" in printed
        assert "TORCH_CPU_INDEX" in printed
