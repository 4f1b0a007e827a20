"""Selector: asks a function that is named `module:function` which groups are kept.

The function runs in a process of its own, which is started at the first question and lives as long as the session. One
that hangs, or takes its process with it, costs an error that names it. It stops neither the service nor what the
session does in the background. Facts and answers travel as JSON: nothing is unpickled. Invariant: no process outlives
`close`, nor this one.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict

from trainer_client.selection.facts import GroupFacts

START_TIMEOUT_S = 120.0
"""Longest time, in seconds, for the process to start and to import the function."""
_END_S = 5.0


class SelectionFailed(RuntimeError):
    """Error: a function that selects groups raised, hung, died, or returned what is no selection."""


class Selector:
    """Selector of groups by the function `name`. `timeout_s`: longest time, in seconds, for one answer.

    One thread uses it.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self.name = name
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def keeps(self, groups: Sequence[GroupFacts]) -> list[bool]:
        """Ask which groups are kept. Raises SelectionFailed; asked again, it starts a new process where it has to."""
        if not groups:
            return []
        try:
            if self._process is None:
                self._start()
            kept = self._ask([asdict(each) for each in groups], self._timeout_s)["keep"]
        except TimeoutError:
            self.close()
            raise SelectionFailed(f"{self.name} has not answered within its time, {self._timeout_s} s") from None
        except (OSError, EOFError):
            raise SelectionFailed(f"{self.name}: its process {self._verdict()}") from None
        except SelectionFailed:
            raise
        except BaseException:
            # It may still be at work, and would answer the next question.
            self.close()
            raise
        assert isinstance(kept, list)  # noqa: S101 - the child's own answer
        return kept

    def close(self) -> None:
        """End the process, with everything that it has started."""
        process, self._process = self._process, None
        if self._connection is not None:
            self._connection.close()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - this very module, and the trainer's own function
                [sys.executable, "-m", "trainer_client.selection.child", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(part or "." for part in sys.path)},
                start_new_session=True,
            )
        self._connection = ours
        try:
            self._ask({"function": self.name}, START_TIMEOUT_S)
        except SelectionFailed:
            self.close()
            raise

    def _ask(self, question: object, timeout_s: float) -> dict[str, object]:
        """Send a question and wait for its answer. Raises SelectionFailed, TimeoutError, OSError, EOFError."""
        connection = self._connection
        assert connection is not None  # noqa: S101 - it was started
        connection.settimeout(timeout_s)
        connection.sendall(json.dumps(question).encode() + b"\n")
        received = bytearray()
        while not received.endswith(b"\n"):
            part = connection.recv(1 << 16)
            if not part:
                raise EOFError
            received += part
        said: dict[str, object] = json.loads(received)
        if "error" in said:
            raise SelectionFailed(f"{self.name}: {said['error']}")
        return said

    def _verdict(self) -> str:
        process = self._process
        assert process is not None  # noqa: S101 - it was started
        try:
            code = process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        finally:
            self.close()
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
