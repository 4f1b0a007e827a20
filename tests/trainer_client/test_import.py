"""What importing the client brings with it."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.matrix

PROGRAM = """
import sys, time
started = time.process_time()
import trainer_client
spent = time.process_time() - started
heavy = {"torch", "safetensors", "redis", "pydantic", "buffer_service", "rollout_workers"} & set(sys.modules)
print(spent, *sorted(heavy))
"""


def test_the_core_imports_fast_and_without_heavy_packages() -> None:
    answers = [
        subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(3)
    ]
    assert all(len(answer) == 1 for answer in answers), answers
    # CPU seconds, the best of three: other work on the machine must not decide.
    assert min(float(answer[0]) for answer in answers) < 0.3
