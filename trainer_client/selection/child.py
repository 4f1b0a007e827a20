"""Process of a function that selects groups: `python -m trainer_client.selection.child FD PARENT`.

It answers on the socket FD, a line of JSON for each line, until that is closed. It ends with its parent. The function
may print, keep what it has seen, and take its process with it.
"""

import ctypes
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from trainer_client.selection.facts import GroupFacts

Select: TypeAlias = Callable[[Sequence[GroupFacts]], Sequence[bool]]
"""Callable that says of each group, in their order, whether it is kept."""

_PR_SET_PDEATHSIG = 1


def load(name: str) -> Select:
    """Import what `module:function` names. Raises ImportError, AttributeError, TypeError."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{name} is a {type(found).__name__}, no function")
    select: Select = found
    return select


def answer(select: Select, groups: Sequence[GroupFacts]) -> dict[str, object]:
    """Ask the function; the answer is {"keep": …}, or {"error": …} for what it raised or should not have returned."""
    try:
        keep = [bool(one) for one in select(groups)]
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        return {"error": f"it raised {type(error).__name__}: {error}"}
    if len(keep) != len(groups):
        return {"error": f"it returned {len(keep)} values for {len(groups)} groups"}
    return {"keep": keep}


def main() -> int:
    """Serve; returns the exit code."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):
        return 1
    with socket.socket(fileno=int(sys.argv[1])) as connection, connection.makefile("rw") as stream:
        try:
            select = load(json.loads(stream.readline())["function"])
        except Exception as error:  # noqa: BLE001 - of the user's module
            _send(stream, {"error": f"it cannot be imported: {type(error).__name__}: {error}"})
            return 1
        _send(stream, {})
        while line := stream.readline():
            _send(stream, answer(select, [GroupFacts(**facts) for facts in json.loads(line)]))
    return 0


def _send(stream: Any, message: dict[str, object]) -> None:  # noqa: ANN401 - a socket's file
    stream.write(json.dumps(message) + "\n")
    stream.flush()


if __name__ == "__main__":
    sys.exit(main())
