"""Real SGLang of the tests: the environment that it is installed in, and the server of a module."""

import os
from pathlib import Path

import pytest

from rollout_workers.engine.sglang.launch import SglangLauncher
from rollout_workers.engine.sglang.server import SglangServerOptions

_REPOSITORY = Path(__file__).parents[2]


def sglang_python() -> Path:
    """Its interpreter: RB_TEST_SGLANG_PYTHON, or .venv-sglang. Fails the test that asks if there is none."""
    python = Path(os.environ.get("RB_TEST_SGLANG_PYTHON", _REPOSITORY / ".venv-sglang/bin/python"))
    if not python.exists():
        pytest.fail(f"tests marked `engine` need SGLang, and there is no {python}: run `make install-sglang` first")
    return python


def real_sglang(model: Path, folder: Path, *flags: str) -> SglangLauncher:
    """A server for an `async with`, in float32 and at version 1.0, its log in `folder`. `flags`: more of its own."""
    return SglangLauncher(
        SglangServerOptions(
            python=sglang_python(),
            model_path=model,
            log_path=folder / "sglang.log",
            weight_version="1.0",
            dtype="float32",
            stop_grace_s=0.5,
            extra_flags=flags,
        )
    )
