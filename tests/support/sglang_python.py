"""Path to the environment that real SGLang is installed in."""

import os
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).parents[2]


def sglang_python() -> Path:
    """Its interpreter: RB_TEST_SGLANG_PYTHON, or .venv-sglang. Fails the test that asks if there is none."""
    python = Path(os.environ.get("RB_TEST_SGLANG_PYTHON", _REPOSITORY / ".venv-sglang/bin/python"))
    if not python.exists():
        pytest.fail(f"tests marked `engine` need SGLang, and there is no {python}: run `make install-sglang` first")
    return python
