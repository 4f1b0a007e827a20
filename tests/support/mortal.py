"""Children that do not outlive the tests, not even killed ones; no fork that gRPC's threads could upset."""

import os
import sys
from collections.abc import Sequence

PROGRAM = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
"""Asks Linux for SIGTERM when the thread that started it ends, then becomes the command: PR_SET_PDEATHSIG is 1."""


def mortal(command: Sequence[str]) -> list[str]:
    """The command (an absolute path and arguments), to be started by this process's main thread."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-S", "-E", "-c", PROGRAM, str(os.getpid()), *command]
