"""What importing the client brings with it. How long it takes is a measurement (bench/imports.py), not a test."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.matrix

PROGRAM = """
import sys
import trainer_client
heavy = {
    "torch", "safetensors", "transformers", "trl", "verifiers", "aiohttp", "structlog", "redis", "pydantic",
    "buffer_service", "rollout_workers",
} & set(sys.modules)
print(*sorted(heavy))
"""


def test_the_core_imports_without_heavy_packages() -> None:
    answer = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == []
