"""A producer or a consumer as a process of its own, in whichever environment its side needs.

`python -m bench.peers.program FD MODULE ROLE FOLDER` takes commands over the socket FD: `open`, and those of
bench.peers.producing or bench.peers.consuming. MODULE has the classes Producer and Consumer.
"""

import importlib
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.peers.consuming import Consuming
from bench.peers.groups import Size
from bench.peers.producing import Producing
from bench.peers.signals import Signals

if TYPE_CHECKING:
    from collections.abc import Callable


class _End:
    """The open end, and the commands that it takes."""

    def __init__(self, module: Any, role: str, signals: Signals) -> None:  # noqa: ANN401 - a side's module
        self._module = module
        self._role = role
        self._signals = signals
        self._commands: dict[str, Callable[..., object]] = {"open": self._open}

    def call(self, name: str, *arguments: object) -> object:
        """Carry a command out."""
        return self._commands[name](*arguments)

    def _open(self, queue: str, address: dict[str, str], size: Size) -> None:
        if self._role == "producer":
            commands = Producing(self._module.Producer(queue, address, size), self._signals, size).commands
        else:
            commands = Consuming(self._module.Consumer(queue, address, size), self._signals, size).commands
        self._commands = {"open": self._open, **commands}


def main() -> None:
    """Take commands until the other side hangs up."""
    # Ctrl-C is for whoever started this process, which ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    end = _End(importlib.import_module(sys.argv[2]), sys.argv[3], Signals(Path(sys.argv[4])))
    connection.send(("ok", os.getpid()))
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("ok", end.call(name, *arguments)))
        except Exception:  # noqa: BLE001 - it is raised again on the other side
            connection.send(("error", traceback.format_exc()))


if __name__ == "__main__":
    main()
