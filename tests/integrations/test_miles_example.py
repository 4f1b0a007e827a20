"""The example runs as its README says."""

import subprocess
import sys

LINES = (
    "Creating new global async worker...",
    "Continuous async rollout worker started",
    "Global worker queue size: 0",
)


def test_example_trains_through_the_loop() -> None:
    command = [sys.executable, "-m", "examples.miles", "--rollouts", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert tuple(said[:3]) == LINES
    rollouts = [line for line in said if line.startswith("rollout ")]
    assert [line.split(":")[0] for line in rollouts] == ["rollout 0", "rollout 1", "rollout 2"]
    assert all("8 groups, 32 samples" in line for line in rollouts)
    assert [line.rsplit(" ", 1)[1] for line in rollouts] == ["1", "2", "3"]
