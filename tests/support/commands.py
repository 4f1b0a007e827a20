"""The command line as a user's shell runs it."""

import os
import subprocess
import sys


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `rollout-buffer` in this environment without its RB_* variables, and with these; its output as text."""
    around = {name: value for name, value in os.environ.items() if not name.startswith("RB_")}
    return subprocess.run(
        [sys.executable, "-m", "buffer_cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**around, "COLUMNS": "160", **environment},
    )
