"""The processes of an example end with it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import sys, time
from pathlib import Path
from examples.demo.processes import service
with service(Path(sys.argv[1])) as (child, address, _):
    print(child.process.pid, flush=True)
    time.sleep(60)
"""


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_sigterm_ends_what_an_example_has_started(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        assert _is_there(pid)
        program.send_signal(signal.SIGTERM)
        assert program.wait(30) == 128 + signal.SIGTERM
    assert not _is_there(pid)
