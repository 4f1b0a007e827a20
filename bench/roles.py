"""Processes with one role each (server, producer, consumer), driven over a pipe, so that CPU is counted by role."""

import multiprocessing as mp
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self, TypeAlias

Result: TypeAlias = Any

_SPAWN = mp.get_context("spawn")
_REPLY_TIMEOUT_S = 300.0

Handler = Callable[..., Any]
"""Function of a role for one command; its return value travels back."""


def _serve(connection: Connection, build: Callable[..., dict[str, Handler]], args: tuple[object, ...]) -> None:
    # Before gRPC is imported by `build`: the same malloc settings for every side.
    from buffer_wire.malloc import keep_big_blocks

    keep_big_blocks()
    handlers = build(*args)
    connection.send(("ok", None))
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("ok", handlers[name](*arguments)))
        except Exception as error:  # noqa: BLE001 - it is raised again on the other side
            connection.send(("error", repr(error)))


class Role:
    """A process whose `build(*args)` returns the commands it understands."""

    def __init__(self, build: Callable[..., dict[str, Handler]], *args: object) -> None:
        self._pipe, child = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(child, build, args), daemon=True)
        self._process.start()
        child.close()
        self.wait()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid or 0

    def start(self, name: str, *arguments: object) -> None:
        """Begin a command; `wait` for its result."""
        self._pipe.send((name, arguments))

    def wait(self) -> Result:
        """The result of the command begun last."""
        if not self._pipe.poll(_REPLY_TIMEOUT_S):
            raise TimeoutError(f"a benchmark process did not answer within {_REPLY_TIMEOUT_S} s")
        status, value = self._pipe.recv()
        if status == "error":
            raise RuntimeError(value)
        return value

    def call(self, name: str, *arguments: object) -> Result:
        """Run a command to its end."""
        self.start(name, *arguments)
        return self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
